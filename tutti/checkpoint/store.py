"""Saving checkpoints, whole and durable before they have a name; of torch through torch.distributed.checkpoint."""

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tutti.checkpoint.manifest import NAME, Manifest, file_sum, folder_name, saved
from tutti.errors import CheckpointError
from tutti.ranks.group import Group
from tutti.runs.files import sync_path, write_durably

_ALMOST_NOTHING = 1 << 16  # bytes


def save(
    checkpoints: Path,
    manifest: Manifest,
    write: Callable[[Path, Group], Iterable[Path]],
    group: Group,
    keep: int,
    is_best: bool = False,
) -> None:
    """Save on all ranks; on failure every rank raises, and what was there before is untouched.

    Every rank calls `write`, which returns the files whose checksums that rank computes.
    """
    final = checkpoints / folder_name(manifest.step)
    partial = checkpoints / f".{final.name}.partial"
    if group.is_first:
        shutil.rmtree(partial, ignore_errors=True)
    problem = _seal(partial, final, manifest, write, group)
    if problem is None:
        problem = group.from_first(_publish(checkpoints, final, keep, is_best) if group.is_first else None)
    if problem is not None:
        if group.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} was not saved: {problem}")


def write_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> list[Path]:
    """Write a model of torch and its optimizer from all ranks; every rank is to sum up its share of the files."""
    with _quiet():
        dcp.save(_state(model, optimizer), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != NAME)
    return files[group.rank :: group.world_size]


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a verified checkpoint into a model of torch and its optimizer, on any number of ranks."""
    state = _state(model, optimizer)
    with _quiet():
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def model_shape(model: nn.Module) -> dict[str, str]:
    """The names, types and shapes of what a model saves."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for name, value in model.state_dict().items()
    }


def check_model(folder: Path, manifest: Manifest, here: dict[str, str]) -> None:
    """Refuse a checkpoint of another model than the one of this shape, with the first difference."""
    there = manifest.model
    for name in dict.fromkeys((*there, *here)):
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"checkpoint {folder} is of another model: {name} is {there.get(name, 'absent')} in it and "
                f"{here.get(name, 'absent')} in the model of this run. Resume with the recipe that made it "
                f"({manifest.recipe}), without overrides of model.*."
            )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _seal(
    partial: Path, final: Path, manifest: Manifest, write: Callable[[Path, Group], Iterable[Path]], group: Group
) -> str | None:
    """Write every file, sum it up, and give the checkpoint its name; the problem, if any, on every rank."""
    problem, sums = None, {}
    try:
        sums = {path.name: file_sum(path) for path in write(partial, group)}
    except (Exception, CheckpointException) as error:  # Keras and torch wrap errors of the system in many types
        problem = _full_disk(final.parent) or _reason(error)
    found = group.gather((problem, sums))
    problem = next((text for text, _ in found if text), None)
    if group.is_first and problem is None:
        files = {name: value for _, part in found for name, value in part.items()}
        try:
            replace(manifest, ranks=group.world_size, files=files).write(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(partial, final)
            sync_path(final.parent)
        except OSError as error:
            problem = _reason(error)
    return group.from_first(problem)


def _publish(checkpoints: Path, final: Path, keep: int, is_best: bool) -> str | None:
    """Move the pointers, then remove what is no longer needed."""
    try:
        write_durably(checkpoints / "latest", final.name + "\n")
        if is_best:
            write_durably(checkpoints / "best", final.name + "\n")
    except OSError as error:
        return _reason(error)
    pointed = {final.name}
    with contextlib.suppress(OSError):
        pointed.add((checkpoints / "best").read_text().strip())
    for folder in saved(checkpoints)[:-keep]:
        if folder.name not in pointed:
            shutil.rmtree(folder, ignore_errors=True)
    return None


def _full_disk(folder: Path) -> str | None:
    """The system's message where the disk is full; torch's own message is about positions in a file."""
    return os.strerror(errno.ENOSPC) if shutil.disk_usage(folder).free < _ALMOST_NOTHING else None


def _reason(error: BaseException) -> str:
    """The system's own message, taken out of the errors that wrap it."""
    failures = getattr(error, "failures", None)  # torch's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {_reason(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".split("\n")[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides torch's warnings about its own inner API."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield
