"""The Python API: train objects of one's own, alone or as a rank of whatever has started this script."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutti.config.load import resolve_values
from tutti.ranks.environments import discover
from tutti.train.build import Objects
from tutti.train.meters import Metrics
from tutti.train.run import Outcome, run_rank


def fit(
    model: nn.Module,
    train_data: Any,
    valid_data: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    metrics: Metrics | None = None,
    name: str = "fit",
    **recipe: Any,
) -> Outcome:
    """Train a model on a dataset with the keys of a recipe: `optim={...}, batch={...}, epochs=3`.

    Run the script with `python` for one rank, or with `tutti run -n 4`, `mpirun` or `srun` for more.
    """
    values = {"data": {"name": _name(train_data)}, "model": {"name": _name(model)}, "recipe": name} | recipe
    if metrics is not None:
        values["metrics"] = [_name(metric) for metric in metrics.values()]
    if loss is not None:
        values["loss"] = {"name": _name(loss)}
    config = resolve_values(values)
    objects = Objects(model, train_data, valid_data, loss, metrics)
    return run_rank(config, discover(os.environ), objects=objects)


def _name(thing: Any) -> str:
    """`module:object`, so that the record says what was trained."""
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}:{kind.__qualname__}"
