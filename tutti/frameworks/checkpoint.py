"""Checkpoints of a Keras model: written by rank 0, whole and durable before they have a name, read on any ranks."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tutti.checkpoint.manifest import Manifest, file_sum, folder_name
from tutti.checkpoint.store import full_disk, publish, reason
from tutti.errors import CheckpointError
from tutti.frameworks.machine import quiet_import
from tutti.frameworks.network import Network
from tutti.ranks.group import Group
from tutti.runs.files import sync_folder

MODEL, OPTIMIZER = "model.keras", "optimizer.npz"


def save(
    checkpoints: Path, manifest: Manifest, network: Network, group: Group, keep: int, is_best: bool = False
) -> None:
    """Save from rank 0; on failure every rank raises, and what was there before is untouched."""
    final = checkpoints / folder_name(manifest.step)
    network.sync()
    problem = _write(checkpoints, final, manifest, network, keep, is_best) if group.is_first else None
    problem = group.from_first(problem)
    if problem is not None:
        raise CheckpointError(f"checkpoint {final} was not saved: {problem}")


def load(folder: Path, network: Network) -> None:
    """Read a verified checkpoint into a model and its optimizer."""
    network.core.load_weights(folder / MODEL)
    variables = network.optimizer.variables
    with np.load(folder / OPTIMIZER) as arrays:
        found = [arrays[name] for name in sorted(arrays.files)]
    if [value.shape for value in found] != [tuple(variable.shape) for variable in variables]:
        raise CheckpointError(
            f"checkpoint {folder} is of another optimizer: {OPTIMIZER} holds {len(found)} arrays, and the optimizer of "
            f"this run has {len(variables)}, or others. Resume without overrides of optim.* and precision."
        )
    for variable, value in zip(variables, found, strict=True):
        variable.assign(value)


def model_shape(model: keras.Model) -> dict[str, str]:
    """The place, type and shape of what a model saves; Keras' own names count up in a process."""
    return {
        f"{place}.{type(layer).__name__}.{variable.name}": f"{variable.dtype} {list(variable.shape)}"
        for place, layer in enumerate(model.layers)
        for variable in layer.weights
    }


def _write(
    checkpoints: Path, final: Path, manifest: Manifest, network: Network, keep: int, is_best: bool
) -> str | None:
    """What went wrong, if anything did."""
    partial = checkpoints / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        with quiet_import():
            network.core.save(partial / MODEL)
        _save_variables(partial / OPTIMIZER, network.optimizer.variables)
        for name in (MODEL, OPTIMIZER):
            _sync_file(partial / name)
        sums = {name: file_sum(partial / name) for name in (MODEL, OPTIMIZER)}
        replace(manifest, files=sums).write(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        sync_folder(checkpoints)
    except Exception as error:  # Keras wraps what the system says in errors of many kinds
        problem = full_disk(checkpoints) or reason(error)
        shutil.rmtree(partial, ignore_errors=True)
        return problem
    return publish(checkpoints, final, keep, is_best)


def _save_variables(path: Path, variables: list[Any]) -> None:
    values: list[Any] = [keras.ops.convert_to_numpy(variable) for variable in variables]
    np.savez(path, **{f"{place:05d}": value for place, value in enumerate(values)})


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
