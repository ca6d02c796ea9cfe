"""A trained model as a file for other programs: weights by name, an ONNX graph, or a model of Keras."""

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tutti.after.run import ChosenCheckpoint, OpenedRun, build_model, fill, load_keras, read_weights
from tutti.config import parts
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, DataError, FolderError, nearest
from tutti.runs.files import replacing, write_durably

SUFFIXES = {
    "safetensors": ".safetensors",
    "torch": ".pt",
    "onnx": ".onnx",
    "keras": ".keras",
    "weights.h5": ".weights.h5",
}
_OF_KERAS = ("keras", "weights.h5")


def export(run: OpenedRun, kind: str, out: Path | None, which: str | int, force: bool) -> tuple[Path, ChosenCheckpoint]:
    """Write the model of a checkpoint as a file of a kind, whole or not at all; returns the file and the checkpoint."""
    config = run.config
    _check_kind(kind, config)
    chosen = run.checkpoint(which)
    path = out or run.folder.path / f"model{SUFFIXES[kind]}"
    if not path.name.endswith(SUFFIXES[kind]):
        raise ConfigError(f"--out {path}: expected a file that ends in {SUFFIXES[kind]} for --to {kind}.")
    about = path.with_name(f"{path.name}.json")
    for each in (path, about) if kind == "torch" else (path,):
        if each.exists() and not force:
            raise FolderError(
                f"{each} exists: expected a new file. Choose another with --out, or replace it by --force."
            )
    if not path.parent.is_dir():
        raise FolderError(f"--out {path}: there is no folder {path.parent}. Create it, or choose another.")
    facts = describe(run, chosen)
    try:
        with replacing(path) as aside:
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
            f"--to {kind}: the run has framework={config.framework}, of which {' and '.join(fits)} are available."
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
    shutil.copyfile(chosen.path / "model.keras", path)


def _write_keras_weights(path: Path, run: OpenedRun, chosen: ChosenCheckpoint, facts: dict[str, Any]) -> None:
    load_keras(chosen, run.config).save_weights(path)


_WRITERS: dict[str, Callable[[Path, OpenedRun, ChosenCheckpoint, dict[str, Any]], None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "onnx": _write_onnx,
    "keras": _copy_keras,
    "weights.h5": _write_keras_weights,
}
