"""Elastic training with torch: `elastic.run`, the state of a model and its optimizer, and a sampler that re-divides."""

from collections.abc import Callable
from typing import Any

from tutti.hvd.elastic.loop import run_fn
from tutti.hvd.torch import ops
from tutti.hvd.torch.elastic.sampler import ElasticSampler
from tutti.hvd.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is the state: it survives the loss of ranks and new hosts."""
    return run_fn(func, reset)


def reset() -> None:
    """Leave the job and join the next one."""
    ops.shutdown()
    ops.init()
