"""The loss and metrics of a checkpoint on a split of the data, by the learner and the batches that validation uses."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.checkpoint.manifest import Manifest
from tutti.config import parts
from tutti.config.load import change
from tutti.config.run import RunConfig
from tutti.config.schema import ParallelConfig
from tutti.data.dataset import find_part
from tutti.errors import ConfigError, DataError, nearest
from tutti.ranks.group import check_same_code
from tutti.ranks.hang_detection import Monitor
from tutti.ranks.placement import Placement
from tutti.runs.step_parts import StepPart
from tutti.train.build import Framework, agreed, offered_to_data
from tutti.train.metrics import weighted_means
from tutti.units import EMA

SPLITS = ("valid", "test", "train")


@dataclass(frozen=True)
class Evaluation:
    """What a checkpoint comes to on a split."""

    split: str
    samples: int
    ranks: int
    metrics: dict[str, float]


def check_split(config: RunConfig, split: str) -> None:
    """Refuse a split that the dataset does not have."""
    if config.script is not None:
        raise ConfigError(
            f"the run was trained by the script {config.script}, in a loop of its own, which alone knows its loss: "
            "expected a run of a recipe. Evaluate in the script, with run.share and run.average."
        )
    known = (*SPLITS, *(config.valid or ()))
    if split not in known:
        raise ConfigError(f"--split {split}: expected one of {', '.join(known)}.{nearest(split, known)}")
    if split == "test" and config.data.target:
        raise ConfigError(
            f"--split test: data.name={config.data.name} has the splits train and valid. Name other data, as in "
            "data.path=FOLDER, or choose --split valid."
        )


def for_ranks(config: RunConfig, record: Mapping[str, Any], ranks: int, overrides: Sequence[str]) -> RunConfig:
    """The configuration for another number of ranks than trained: batches as in validation, the whole model on each."""
    plan = record.get("plan") or {}
    if ranks == record.get("ranks") or any(text.startswith(("batch", "parallel")) for text in overrides):
        return config
    trained = plan.get("micro_batch" if config.framework == "torch" else "per_rank_batch")
    size = config.batch.eval or trained or config.batch.per_rank or config.batch.global_batch
    changes = [f"batch.per_rank={size}", "batch.micro=null", f"batch.eval={size}"]
    changes += [f"parallel.{name}={value}" for name, value in ParallelConfig().model_dump().items()]
    return change(config, changes)


def evaluate(
    framework: Framework,
    config: RunConfig,
    placement: Placement,
    split: str,
    folder: Path,
    manifest: Manifest,
    averages: bool = False,
) -> Evaluation:
    """Evaluate a verified checkpoint, or its averaged weights, as one rank; every rank returns the same.

    Nothing is written.
    """

    def check() -> None:
        framework.check(config, placement.world_size)

    with framework.joined(config, placement, check, lambda store: None) as rank:
        group = rank.group
        check_same_code(group)
        monitor = Monitor(placement, group.hub, group.hosts, config.runtime)
        try:
            with monitor.explained():
                agreed(group, functools.partial(framework.prepare_data, config) if group.is_first else lambda: None)
                built = agreed(group, functools.partial(framework.build_parts, config, placement, rank.device))
                agreed(group, functools.partial(_check_model, built, folder, manifest))
                data = agreed(group, functools.partial(_choose_data, built, config, placement, rank.device, split))
                learner = built.make_learner(config, group, rank.device, monitor.enter)
                learner.load_weights(folder, averages)

                def goes_on() -> bool:
                    monitor.enter(StepPart.VALIDATION, manifest.step)
                    return True

                goes_on()
                totals = group.sum(learner.evaluate(data, group, goes_on)).tolist()
                monitor.suspend()
        finally:
            monitor.close()
        means = weighted_means(learner.names, totals)
    suffix = EMA if averages else ""
    begin = f"valid_{split}" if split in built.valid_sets else split
    return Evaluation(
        split, len(data), placement.world_size, {f"{begin}_{name}{suffix}": means[name] for name in means}
    )


def _check_model(built: Any, folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint of another model; its optimizer does not matter."""
    from tutti.checkpoint.store import check_model, model_shape

    shape = model_shape(built.model) if hasattr(built, "model") else built.learner.shape()
    check_model(folder, manifest, shape)


def _choose_data(built: Any, config: RunConfig, placement: Placement, device: Any, split: str) -> Any:
    if split in built.valid_sets:
        return built.valid_sets[split]
    if split == "train":
        return built.train_data
    if split == "valid":
        if built.valid_data is None:
            raise DataError("the run has no validation data: expected some. Choose --split train.")
        return built.valid_data
    factory = config.data.locate()
    if "split" not in inspect.signature(factory).parameters:
        raise ConfigError(f"--split test: {config.data.name} takes no split. Choose --split valid.")
    offered = offered_to_data(config, placement, device)
    data = parts.call(factory, "data", config.data.options(), split="test", **offered)
    part = find_part(built.plan.layout, placement.rank)
    return data.for_part(part) if part is not None and hasattr(data, "for_part") else data
