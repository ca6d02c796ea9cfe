"""A run opened for reading: its configuration, metrics, checkpoints and model, also as a file for other programs.

It is light until a model is made.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tutti.checkpoint.manifest import Manifest, choose, read_pointer, saved, step_of, verify
from tutti.config import parts
from tutti.config.framework import check_installed, keras_backend
from tutti.config.load import resolve
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, DataError, FolderError, nearest
from tutti.runs.files import replacing, write_durably
from tutti.runs.folder import RunFolder
from tutti.runs.listing import find_run, find_runs
from tutti.runs.metrics import read_events
from tutti.runs.record import read_record
from tutti.units import EMA

_KERAS_FILE = "model.keras"
SUFFIXES = {
    "safetensors": ".safetensors",
    "torch": ".pt",
    "onnx": ".onnx",
    "keras": ".keras",
    "weights.h5": ".weights.h5",
}
_OF_KERAS = ("keras", "weights.h5")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A finished checkpoint of a run."""

    name: str
    step: int
    epoch: int | None  # of its step, counted from 1; None where the record does not tell the steps of an epoch
    path: Path
    is_best: bool
    is_last: bool


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint whose every file is as it was written."""

    path: Path
    manifest: Manifest
    note: str  # where another one is taken than was asked for, or other weights than it was chosen by
    ema: bool = False  # whether its averaged weights are meant


class OpenedRun:
    """A run folder to read from."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"<run {self.folder.path}: {self.record.get('state', 'unknown')}>"

    @cached_property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return resolve(str(self.folder.config)).config

    @property
    def record(self) -> dict[str, Any]:
        """What record.json holds."""
        return read_record(self.folder.record) or {}

    @property
    def metrics(self) -> Any:
        """The rows of metrics.jsonl: a DataFrame where pandas is installed, else a list of dicts."""
        rows = list(read_events(self.folder.metrics))
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    @property
    def results(self) -> dict[str, float]:
        """The results of the last epoch."""
        if (found := self.record.get("results")) is not None:
            return found
        epochs = [row for row in read_events(self.folder.metrics) if row.get("event") == "epoch"]
        return {name: value for name, value in (epochs or [{}])[-1].items() if name.startswith(("train_", "valid_"))}

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The finished checkpoints, oldest first."""
        place = self.folder.checkpoints
        best, last = read_pointer(place / "best"), read_pointer(place / "latest")
        found = [(path, step_of(path)) for path in saved(place)]
        return [
            SavedCheckpoint(path.name, step, self._epoch(step), path, path.name == best, path.name == last)
            for path, step in found
        ]

    def checkpoint(self, which: str | int = "best", ema: bool = False) -> ChosenCheckpoint:
        """The checkpoint that is meant by best, last or a step; best means the last where none was saved as best.

        `ema` says that its averaged weights are meant.
        """
        if ema and self.config.ema is None:
            raise ConfigError(f"{self.folder.path} has no averaged weights: expected a run with ema. Leave --ema out.")
        path, note = choose(self.folder.checkpoints, which)
        best = self.config.checkpoint.best or ""
        if not note and which == "best" and not ema and best.endswith(EMA):
            note = f"the checkpoint is the best by checkpoint.best={best}, of averaged weights, which --ema takes"
        return ChosenCheckpoint(path, verify(path), note, ema)

    def weights(self, which: str | int = "best", ema: bool = False) -> dict[str, Any]:
        """The state dict of a run of torch, of whole tensors on the CPU, whatever layout and ranks it had.

        With `ema`, weights are those averaged over steps.
        """
        return read_weights(self.checkpoint(which, ema), self.config)

    def model(self, which: str | int = "best", into: Any = None, ema: bool = False) -> Any:
        """The torch module, or the Keras model, with the weights of a checkpoint, on the CPU and in eval mode.

        `into` is a module to put the weights into, for a run whose recipe does not name its model (`tutti.fit`).
        With `ema`, the weights are those averaged over steps.
        """
        chosen = self.checkpoint(which, ema)
        if self.config.framework != "torch":
            return load_keras(chosen, self.config)
        if into is None:
            check_named(self)
        model = into if into is not None else build_model(self.config, self.record)
        return fill(model, read_weights(chosen, self.config), chosen)

    def _epoch(self, step: int) -> int | None:
        steps = (self.record.get("plan") or {}).get("steps_per_epoch")
        return (step - 1) // int(steps) + 1 if steps else None


def check_named(run: OpenedRun) -> None:
    """Refuse a run of a script, of which only the script can make the models: its module is never imported."""
    if run.config.script is not None:
        raise ConfigError(
            f"{run.folder.path} was trained by the script {run.config.script}, which makes its models itself. In "
            "Python, give them by the names that run.keep has: .model(into=nn.ModuleDict({...})). Of the commands, "
            "tutti export --to torch or --to safetensors writes the weights of all of them."
        )


def open_run(folder: str | os.PathLike[str], out: str | os.PathLike[str] = "runs") -> OpenedRun:
    """A run by its folder, by a name as `tutti runs` prints it of runs below `out`, or `latest`, the newest of them."""
    found = _newest(Path(out)) if folder == "latest" else find_run(os.fspath(folder), Path(out))
    if not found.config.is_file():
        raise FolderError(f"{found.path} has no config.yaml: expected the folder of a run that has begun to train.")
    return OpenedRun(found)


def _newest(out: Path) -> RunFolder:
    begun = [run.folder for run in find_runs(out) if run.folder.config.is_file() and not run.folder.study.exists()]
    if not begun:
        raise FolderError(f"there is no run in {out}: expected one. Train something first, or name a run folder.")
    return begun[-1]


def read_weights(chosen: ChosenCheckpoint, config: RunConfig) -> dict[str, Any]:
    """The whole tensors of a checkpoint of torch."""
    if config.framework != "torch" or _KERAS_FILE in chosen.manifest.files:
        raise ConfigError(f"{chosen.path} was saved by Keras: expected a run of torch. Use .model(), a Keras model.")
    from tutti.checkpoint.weights import read_checkpoint

    return read_checkpoint(chosen.path, chosen.ema)


def build_model(config: RunConfig, record: dict[str, Any]) -> Any:
    """The recipe's model with weights of any values, on the CPU; its data is read only where the record is too old."""
    target, options = config.model.locate(), config.model.options()
    shapes = record.get("data")
    if shapes is None:
        shapes = _shapes_of(config)
    offered = {name: value for name, value in shapes.items() if value is not None}
    if "input_shape" in offered:
        offered["input_shape"] = tuple(offered["input_shape"])
    return parts.call(target, "model", options, **offered)


def _shapes_of(config: RunConfig) -> dict[str, Any]:
    """What the data tells of a model's shape."""
    import torch

    config.data.prepare()
    offered = {"split": "train", "device": torch.device("cpu"), "local_ranks": 1}
    data = parts.call(config.data.locate(), "data", config.data.options(), **offered)
    return {name: getattr(data, name, None) for name in ("input_shape", "num_classes")}


def fill(model: Any, weights: dict[str, Any], chosen: ChosenCheckpoint) -> Any:
    """Put the weights of a checkpoint into a module of the same shape."""
    from torch import nn

    from tutti.checkpoint.store import check_model, model_shape

    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}: expected a torch.nn.Module.")
    check_model(
        chosen.path, chosen.manifest, model_shape(model), "Give the module that was trained: .model(into=MODULE)."
    )
    model.load_state_dict(weights)
    return model.cpu().eval()


def load_keras(chosen: ChosenCheckpoint, config: RunConfig) -> Any:
    """The Keras model of a checkpoint, on the backend of the run unless Keras was imported on another before."""
    check_installed(config)
    os.environ.setdefault("KERAS_BACKEND", keras_backend(config))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tutti.frameworks.machine import quiet_import

    with quiet_import():
        import keras

        return keras.models.load_model(chosen.path / _KERAS_FILE, compile=False)


def export(
    run: OpenedRun, kind: str, out: Path | None, which: str | int, force: bool, ema: bool = False
) -> tuple[Path, ChosenCheckpoint]:
    """Write the model of a checkpoint as a file of a kind, whole or not at all; returns the file and the checkpoint."""
    config = run.config
    _check_kind(kind, config)
    if kind == "onnx":
        check_named(run)
    chosen = run.checkpoint(which, ema)
    path = out or run.folder.path / f"model{SUFFIXES[kind]}"
    if not path.name.endswith(SUFFIXES[kind]):
        raise ConfigError(f"--out {path}: expected a file that ends in {SUFFIXES[kind]} for --to {kind}.")
    about = path.with_name(f"{path.name}.json")
    for each in (path, about) if kind == "torch" else (path,):
        if each.exists() and not force:
            raise FolderError(
                f"{each} exists: expected a new file. Choose another with --out, or replace it with --force."
            )
    if not path.parent.is_dir():
        raise FolderError(f"--out {path}: there is no folder {path.parent}. Create it, or choose another.")
    facts = describe(run, chosen)
    try:
        with replacing(path) as aside:
            aside.touch()  # libraries wrap what the system says of a folder that cannot be written
            _WRITERS[kind](aside, run, chosen, facts)
        if kind == "torch":
            write_durably(about, json.dumps(facts, indent=1) + "\n")
    except OSError as error:
        raise FolderError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path, chosen


def describe(run: OpenedRun, chosen: ChosenCheckpoint) -> dict[str, Any]:
    """What a user of the weights needs to know of them: the model with its options, shapes, step and results."""
    config, manifest = run.config, chosen.manifest
    return {
        "recipe": config.recipe,
        "framework": config.framework,
        "model": config.model.model_dump(mode="json"),
        "data": run.record.get("data"),
        "step": manifest.step,
        "ema": chosen.ema,
        "results": manifest.progress.get("results", {}),
        "config": config.plain(),
    }


def _check_kind(kind: str, config: RunConfig) -> None:
    if kind not in SUFFIXES:
        raise ConfigError(f"--to {kind}: expected one of {', '.join(SUFFIXES)}.{nearest(kind, SUFFIXES)}")
    in_keras = config.framework != "torch"
    if in_keras != (kind in _OF_KERAS):
        fits = _OF_KERAS if in_keras else [each for each in SUFFIXES if each not in _OF_KERAS]
        raise ConfigError(
            f"--to {kind}: the run has framework={config.framework}, which has the formats {', '.join(fits)}."
        )


def _write_safetensors(path: Path, run: OpenedRun, chosen: ChosenCheckpoint, facts: dict[str, Any]) -> None:
    from tutti.checkpoint.weights import write_safetensors

    write_safetensors(path, read_weights(chosen, run.config), {"format": "pt", "tutti": json.dumps(facts)})


def _write_torch(path: Path, run: OpenedRun, chosen: ChosenCheckpoint, facts: dict[str, Any]) -> None:
    import torch

    torch.save(read_weights(chosen, run.config), path)


def _write_onnx(path: Path, run: OpenedRun, chosen: ChosenCheckpoint, facts: dict[str, Any]) -> None:
    try:
        import onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "--to onnx needs onnx and onnxscript. Install them: pip install 'tutti-train[onnx]'."
        ) from None
    model = fill(build_model(run.config, run.record), read_weights(chosen, run.config), chosen)
    inputs = _example(run.config)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of operators of packages that are not there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _export_onnx(model, inputs, path)
    except Exception as error:  # the exporter raises its own errors and those of the model
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--to onnx: {run.config.model.name} cannot be converted ({type(error).__name__}: {reason}). "
            "Export it with --to safetensors or --to torch."
        ) from error


def _export_onnx(model: Any, inputs: Any, path: Path) -> None:
    import torch

    torch.onnx.export(
        model,
        (inputs,),
        str(path),
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("samples")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _example(config: RunConfig) -> Any:
    """Two validation samples, of the type and shape that the model takes."""
    import torch

    from tutti.data.loader import evaluation_batches

    config.data.prepare()
    device = torch.device("cpu")
    offered = {"split": "valid", "device": device, "local_ranks": 1}
    data = parts.call(config.data.locate(), "data", config.data.options(), **offered)
    inputs, _ = next(evaluation_batches(data, 0, 1, 2, device, 0, config.seed))
    if not isinstance(inputs, torch.Tensor):
        raise DataError(f"--to onnx: the inputs are a {type(inputs).__name__}: expected models of one tensor.")
    return inputs.contiguous()


def _copy_keras(path: Path, run: OpenedRun, chosen: ChosenCheckpoint, facts: dict[str, Any]) -> None:
    shutil.copyfile(chosen.path / _KERAS_FILE, path)


def _write_keras_weights(path: Path, run: OpenedRun, chosen: ChosenCheckpoint, facts: dict[str, Any]) -> None:
    load_keras(chosen, run.config).save_weights(path)


_WRITERS: dict[str, Callable[[Path, OpenedRun, ChosenCheckpoint, dict[str, Any]], None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "onnx": _write_onnx,
    "keras": _copy_keras,
    "weights.h5": _write_keras_weights,
}
