"""Checks before anything starts: targets, names of parts, batches; without imports of torch."""

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tutti.config.framework import check_installed
from tutti.config.options import DatasetOptions
from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.config.schedule import make_schedule
from tutti.config.schema import KERAS_WEIGHTS, SAFETENSORS, TORCH_WEIGHTS
from tutti.errors import ConfigError, nearest
from tutti.units import is_lower_better


def is_reached(target: Mapping[str, float], results: Mapping[str, float]) -> bool:
    """Returns whether all metrics of a target have reached their values; a missing metric or a NaN has not."""
    return all(
        metric in results and (results[metric] <= value if is_lower_better(metric) else results[metric] >= value)
        for metric, value in target.items()
    )


_OTHERS = ("cache", "stage")  # folders that data is copied to
_PATH_OPTIONS = ("path", "root", "folder", "file", "files", "train", "valid", "data")


def data_paths(config: RunConfig) -> list[str]:
    """The files and folders that the recipe's data is read from."""
    return [path for data in (config.data, *config.valid_sets().values()) for path in _paths_of(data)]


def missing_data(configs: Iterable[RunConfig]) -> list[str]:
    """The paths of the data of some recipes that cannot be seen from here, or are empty folders."""
    return [path for path in dict.fromkeys(p for config in configs for p in data_paths(config)) if _is_missing(path)]


def _is_missing(path: str) -> bool:
    try:
        return not Path(path).exists() or (Path(path).is_dir() and not any(Path(path).iterdir()))
    except OSError:  # there, but not to be read by whoever submits
        return False


def _paths_of(data: DatasetOptions) -> list[str]:
    options: dict[str, Any] = data.options()
    if data.name == "nbody":
        return [] if options["make"] or options["source"] == "synthetic" else [options["train"], options["valid"]]
    given = [(key, value) for key, value in options.items() if isinstance(value, str)]
    return [value for key, value in given if (key in _PATH_OPTIONS or os.sep in value) and key not in _OTHERS]


def check_measured(given: str, metric: str, config: RunConfig, metrics: Iterable[str]) -> None:
    """Refuse a target for a metric that a run with these `metrics` does not measure."""
    known = [f"valid_{name}" for name in config.measured(metrics)]
    if metric not in known:
        hint = nearest(metric, known)
        raise ConfigError(f"{given}: {config.recipe} measures {', '.join(known)}, and no {metric!r}.{hint}")


def check_parts(config: RunConfig, world_size: int, local_size: int | None = None) -> None:
    """Check what does not depend on data: names that cannot be imported, batches that do not split."""
    if config.framework == "torch":
        for part in (config.data, config.model, config.loss, config.optim, config.step):
            if part is not None:
                part.locate()
        for data in config.valid_sets().values():
            data.locate()
        config.metric_functions()
    else:
        check_installed(config)
        config.data.locate()
    check_loggers(config)
    check_best(config, [name.rpartition(":")[2] for name in config.metrics])
    check_stop(config, config.metrics)
    samples = config.data.train_samples()
    if samples is not None:
        make_schedule(config, make_plan(config, world_size, samples, local_size))


def check_loggers(config: RunConfig) -> None:
    """Refuse a logger whose package is not installed, with the command that installs it."""
    for name in ("wandb", "mlflow"):
        if name in config.log.loggers and find_spec(name) is None:
            raise ConfigError(
                f"log.to={list(config.log.to)} needs the package {name}, which is not installed. "
                f"Install it: pip install 'tutti-train[{name}]', or leave {name} out of log.to."
            )


def check_init(config: RunConfig) -> None:
    """Refuse weights for a new run to begin with that are not there, or not of its framework."""
    if config.init is None:
        return
    given, path = f"init.from={config.init.source}", Path(config.init.source)
    if path.is_dir():
        if not ((path / "checkpoints").is_dir() or (path / "manifest.json").is_file()):
            raise ConfigError(f"{given}: expected a run folder, as `tutti runs` lists them, or a checkpoint in one.")
    elif not path.is_file():
        raise ConfigError(f"{given}: no such file or folder. Give a run folder or a file with weights.")
    in_torch = config.framework == "torch"
    suffixes = (*SAFETENSORS, *TORCH_WEIGHTS) if in_torch else KERAS_WEIGHTS
    if path.is_file() and not path.name.endswith(suffixes):
        raise ConfigError(
            f"{given} with framework={config.framework}: expected a run folder or a file that ends in "
            f"{', '.join(suffixes)}."
        )
    if not in_torch and config.init.only != "*":
        raise ConfigError(
            f"init.only={config.init.only!r} with framework={config.framework}: names of Keras differ between "
            "processes. Leave init.only out; init.strict=false takes the layers that fit."
        )


def check_noise_scale(config: RunConfig, world_size: int) -> None:
    """Refuse to measure the gradient noise scale where a step has one gradient alone."""
    if not config.log.noise_scale:
        return
    batch = config.batch
    per_rank = batch.per_rank or (batch.global_batch or 0) // world_size
    if world_size == 1 and (batch.micro or per_rank) >= per_rank:
        fix = "Start more ranks" if config.framework == "torch" else "Start more ranks, for example with -n 2"
        if config.framework == "torch":
            fix += f", or set batch.micro={max(1, per_rank // 2)}, which accumulates gradients over micro-batches"
        raise ConfigError(
            "log.noise_scale=true on 1 rank whose steps have 1 forward pass: expected 2 or more gradients in a step, "
            f"to compare with their mean. {fix}."
        )
    if not config.ddp.communicate:
        raise ConfigError(
            "log.noise_scale=true with ddp.communicate=false: expected gradients that are averaged over ranks. "
            "Set ddp.communicate=true, or log.noise_scale=false."
        )


def check_best(config: RunConfig, metrics: Iterable[str]) -> None:
    """Refuse a `checkpoint.best` that the run does not measure."""
    best = config.checkpoint.best
    known = config.measured(metrics)
    if best is not None and best not in known:
        known = ", ".join(known)
        raise ConfigError(f"checkpoint.best={best!r}: expected one of this run's metrics, {known}.")


def check_stop(config: RunConfig, metrics: Iterable[str], validates: bool = True) -> None:
    """Refuse to stop at a metric that the run does not measure."""
    wanted = {metric: f"stop_at.{metric}={value:g}" for metric, value in (config.stop_at or {}).items()}
    if config.stop_early is not None:
        wanted |= {config.stop_early.metric: f"stop_early.metric={config.stop_early.metric}"}
    for metric, given in wanted.items():
        if not validates:
            key = given.partition(".")[0]
            raise ConfigError(f"{given}, but there is no validation data: expected some. Give it, or leave out {key}.")
        check_measured(given, metric, config, metrics)
