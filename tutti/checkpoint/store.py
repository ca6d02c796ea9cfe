"""Saving checkpoints, whole and durable before they have a name; of torch through torch.distributed.checkpoint."""

import contextlib
import copy
import errno
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from tutti.checkpoint.manifest import (
    NAME,
    Manifest,
    file_sum,
    folder_name,
    read_pointer,
    replaced_name,
    saved,
    step_of,
)
from tutti.errors import CheckpointError, ConfigError, FolderError
from tutti.ranks.group import Group
from tutti.runs.files import remove_unfinished, sync_path, write_durably

_ALMOST_NOTHING = 1 << 16  # bytes
KEPT = "state.pt"  # what a loop of the user's own keeps, by name; a sharded tensor is on the meta device in it
_AVERAGES = "ema"  # the key of averaged weights, by the names of the trained ones

Key = tuple[Any, ...]  # the keys of dictionaries and places in lists that lead to a value


def save(
    checkpoints: Path,
    manifest: Manifest,
    write: Callable[[Path, Group], Iterable[Path]],
    group: Group,
    keep: int,
    is_best: bool = False,
) -> Manifest:
    """Save on all ranks, and return the manifest; on failure every rank raises, and the last checkpoint is untouched.

    Every rank calls `write`, which returns the files whose checksums that rank computes.
    """
    final = checkpoints / folder_name(manifest.step)
    partial = checkpoints / f".{final.name}.partial"
    if group.is_first:
        shutil.rmtree(partial, ignore_errors=True)
    if not group.from_first(checkpoints.parent.is_dir()):  # and no rank writes before the remains are removed
        error = FolderError(f"the run folder {checkpoints.parent} was deleted: checkpoint {final.name} was not saved.")
        error.agreed = True
        raise error
    problem, sealed = _seal(partial, final, manifest, write, group)
    if problem is None:
        problem = group.from_first(_publish(checkpoints, final, keep, is_best) if group.is_first else None)
    if problem is not None:
        if group.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} was not saved: {problem}")
    return sealed


def complete(checkpoints: Path, manifest: Manifest, is_best: bool) -> None:
    """Write into a checkpoint that was saved before its epoch was validated what validation has found; on rank 0."""
    final = checkpoints / folder_name(manifest.step)
    try:
        manifest.write(final)
        if is_best:
            write_durably(checkpoints / "best", final.name + "\n")
    except OSError as error:
        raise CheckpointError(f"checkpoint {final} does not hold the results of its epoch: {_reason(error)}") from error


def resume_from(folder: Path) -> list[int]:
    """Make a checkpoint the one from which its run continues, on rank 0; return the steps of later ones.

    The later ones are of a part of the run that is given up: the next save removes them, and until then they stay.
    """
    checkpoints = folder.parent
    for unfinished in checkpoints.glob(".step-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for written_to in (checkpoints, checkpoints.parent, *saved(checkpoints)):
        remove_unfinished(written_to)
    try:
        if read_pointer(checkpoints / "latest") != folder.name:
            write_durably(checkpoints / "latest", folder.name + "\n")
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be resumed from: {_reason(error)} ({error.filename})"
        ) from error
    return [step_of(later) for later in saved(checkpoints) if step_of(later) > step_of(folder)]


def write_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | tuple[()],
    group: Group,
    in_stages: bool = False,
    averages: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[Path]:
    """Write a model of torch, its averages and its optimizer from all ranks; every rank sums up its share of the files.

    Without an optimizer, `()`, the model alone is written.
    With `in_stages` ranks hold different layers, by the names that these have in the whole model.
    """
    with _quiet():
        state = _state(model, optimizer, averages)
        if in_stages:
            _name_all(state["optimizer"]["param_groups"], group)
    return write_tensors(folder, state, group)


def write_tensors(folder: Path, state: dict[str, Any], group: Group) -> list[Path]:
    """Write a state from all ranks, each its shards; every rank sums up its share of the files."""
    with _quiet():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != NAME)
    return files[group.rank :: group.world_size]


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | tuple[()],
    averages: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Read a verified checkpoint into a model of torch, averages and the optimizer, on any number of ranks."""
    reader = dcp.FileSystemReader(folder)
    if averages and not any(key.startswith(f"{_AVERAGES}.") for key in reader.read_metadata().state_dict_metadata):
        raise ConfigError(
            f"ema with checkpoint {folder}, which holds no averaged weights: expected one of a run with ema. "
            "Resume without ema, or start a new run."
        )
    state = _state(model, optimizer, averages)
    with _quiet():
        dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def write_kept(folder: Path, state: dict[str, Any], group: Group) -> list[Path]:
    """Write sharded tensors from all ranks, and all else, which is the same on every rank, from rank 0."""
    sharded: dict[str, Any] = {}

    def set_aside(key: Key, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        sharded[_joined(key)] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    state = replace_values(state, set_aside)
    problem: Exception | None = None
    try:
        if group.is_first:
            content = io.BytesIO()
            torch.save(state, content)
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / KEPT, content.getvalue())
    except Exception as found:  # raised below: the other ranks are in a collective until then
        problem = found
    files = [folder / KEPT] if group.is_first else []
    if sharded:
        files = write_tensors(folder, sharded, group)
    if problem is not None:
        raise problem
    return files


def read_kept(
    folder: Path,
    sharded_like: Callable[[Key, torch.Tensor], DTensor | None] = lambda key, value: None,
    needs: Callable[[Key], bool] = lambda key: True,
    alone: bool = False,
) -> dict[str, Any]:
    """What a verified checkpoint holds, whole on the CPU, or in shards like those of another tensor.

    Every rank enters, unless `alone`. Of tensors that were saved in shards, those that nobody needs are not read.
    """
    read: dict[str, Any] = {}

    @torch.no_grad()
    def place(key: Key, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (value.is_meta and not needs(key)):
            return value
        like = sharded_like(key, value)
        if like is None and not value.is_meta:
            return value
        if like is not None and not value.is_meta:  # every rank cuts its part out of its copy
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        if like is None:
            read[_joined(key)] = torch.empty(value.shape, dtype=value.dtype)
        else:
            read[_joined(key)] = torch.empty_like(like, dtype=value.dtype)
        return read[_joined(key)]

    state = replace_values(torch.load(folder / KEPT, map_location="cpu", weights_only=True), place)
    if read:
        with _quiet():
            dcp.load(read, storage_reader=dcp.FileSystemReader(folder), no_dist=alone)
    return state


def replace_values(state: Any, change: Callable[[Key, Any], Any], key: Key = ()) -> Any:
    """A copy of nested dictionaries and lists with other values."""
    if isinstance(state, dict):
        made = copy.copy(state)  # with the attributes of the state of a module
        for name, value in state.items():
            made[name] = replace_values(value, change, (*key, name))
        return made
    if type(state) in (list, tuple):
        return type(state)(replace_values(value, change, (*key, index)) for index, value in enumerate(state))
    return change(key, state)


def _joined(key: Key) -> str:
    return "/".join(map(str, key))


def model_shape(model: nn.Module) -> dict[str, str]:
    """The names, types and shapes of what a model saves."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for name, value in model.state_dict().items()
    }


def check_model(folder: Path, manifest: Manifest, here: dict[str, str], fix: str | None = None) -> None:
    """Refuse a checkpoint of another model than the one of this shape, with the first difference and what to do."""
    there = manifest.model
    for name in dict.fromkeys((*there, *here)):
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"checkpoint {folder} is of another model: {name} is {there.get(name, 'absent')} in it and "
                f"{here.get(name, 'absent')} in the model of this run. "
                + (fix or f"Resume with the recipe that made it ({manifest.recipe}), without overrides of model.*.")
            )


def check_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse a checkpoint of another optimizer, which keeps other values for each parameter."""
    start = "optimizer.state."
    keys = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    there = sorted({key.rpartition(".")[2] for key in keys if key.startswith(start)})
    with _quiet():
        own = _state(model, optimizer)["optimizer"]["state"]
    here = sorted({key for values in own.values() for key in values})
    if here != there:
        raise ConfigError(
            f"optim.name={name!r} with checkpoint {folder}: for each parameter the checkpoint holds "
            f"{', '.join(there) or 'nothing'}, and the optimizer of this run needs {', '.join(here) or 'nothing'}. "
            "Resume without overrides of optim.*, or start a new run."
        )
    for parameter, values in own.items():
        if missing := [key for key in values if f"{start}{parameter}.{key}" not in keys]:
            raise ConfigError(
                f"optim.name={name!r} with checkpoint {folder}: the checkpoint does not hold {', '.join(missing)} of "
                f"{parameter}, which the optimizer of this run needs. Resume without overrides of optim.*, or start a "
                "new run."
            )


def _state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | tuple[()],
    averages: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    return state | ({_AVERAGES: dict(averages)} if averages else {})


def _name_all(groups: list[dict[str, Any]], group: Group) -> None:
    """Put the parameters of all ranks into the optimizer's groups, of which the checkpoint holds those of one rank."""
    names = group.gather([each["params"] for each in groups])
    for index, each in enumerate(groups):
        each["params"] = list(dict.fromkeys(name for found in names for name in found[index]))


def _seal(
    partial: Path, final: Path, manifest: Manifest, write: Callable[[Path, Group], Iterable[Path]], group: Group
) -> tuple[str | None, Manifest]:
    """Write every file, sum it up, and give the checkpoint its name; return the problem, if any, on every rank."""
    problem, sums = None, {}
    try:
        sums = {path.name: file_sum(path) for path in write(partial, group)}
    except (Exception, CheckpointException) as error:  # Keras and torch wrap errors of the system in many types
        problem = _full_disk(final.parent) or _reason(error)
    found = group.gather((problem, sums))
    problem = next((text for text, _ in found if text), None)
    files = {name: value for _, part in found for name, value in part.items()}
    sealed = replace(manifest, ranks=group.world_size, files=files)
    if group.is_first and problem is None:
        try:
            sealed.write(partial)
            _take_name(partial, final)
        except OSError as error:
            problem = _reason(error)
    return group.from_first(problem), sealed


def _take_name(partial: Path, final: Path) -> None:
    """Name a complete checkpoint; one of the same step stays under another name until that is durable."""
    aside = replaced_name(final)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(partial, final)
    sync_path(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _publish(checkpoints: Path, final: Path, keep: int, is_best: bool) -> str | None:
    """Move the pointers, and remove what is no longer needed."""
    try:
        _remove_later(checkpoints, final)
        write_durably(checkpoints / "latest", final.name + "\n")
        if is_best:
            write_durably(checkpoints / "best", final.name + "\n")
    except OSError as error:
        return _reason(error)
    pointed = {final.name, read_pointer(checkpoints / "best")}
    for folder in saved(checkpoints)[:-keep]:
        if folder.name not in pointed:
            shutil.rmtree(folder, ignore_errors=True)
    return None


def _remove_later(checkpoints: Path, final: Path) -> None:
    """Remove the checkpoints of a part of the run that was given up: those after the one that `latest` names."""
    last = step_of(Path(read_pointer(checkpoints / "latest")))
    for folder in saved(checkpoints):
        if folder != final and step_of(folder) > last >= 0:
            if read_pointer(checkpoints / "best") == folder.name:
                (checkpoints / "best").unlink()
            shutil.rmtree(folder, ignore_errors=True)


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
