"""The order in which a checkpoint becomes durable: content, manifest, name, pointer."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tutti.checkpoint.manifest import NAME, Manifest, find_latest, saved, verify
from tutti.checkpoint.store import model_shape, save, write_state
from tutti.ranks.group import Group

OPERATIONS = ("fsync", "rename", "replace")


class OneRank:
    """The group of a run on one rank, without a process group."""

    rank, world_size, is_first = 0, 1, True

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def from_first(self, item: Any) -> Any:
        return item


class Crash(BaseException):
    """The end of the process."""


def save_step(checkpoints: Path, step: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manifest = Manifest("order", step, 1, 8, None, 64, 1, model_shape(model), {})

    def write(folder: Path, group: Group) -> list[Path]:
        return write_state(folder, model, optimizer, group)

    save(checkpoints, manifest, write, cast(Group, OneRank()), keep=2)


def before_each(monkeypatch: pytest.MonkeyPatch, note: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `note` before every operation that makes something durable or gives it a name."""

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            note(name, arguments)
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in OPERATIONS:
        watch(name)


def test_a_checkpoint_is_whole_and_synced_before_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    named: list[list[str]] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fsync":
            synced.add(os.fstat(arguments[0]).st_ino)
        elif name == "rename" and arguments[1] == tmp_path / "step-000001":
            partial = Path(arguments[0])
            files = verify(partial).files
            named.append(sorted(files))
            for file in (*files, NAME):
                assert (partial / file).stat().st_ino in synced, f"{file} has a name and is not on disk"

    before_each(monkeypatch, note)
    save_step(tmp_path, 1)
    assert named == [sorted(path.name for path in (tmp_path / "step-000001").iterdir() if path.name != NAME)]


def test_a_checkpoint_has_a_durable_name_before_the_pointer_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fsync" and os.fstat(arguments[0]).st_ino == tmp_path.stat().st_ino:
            happened.append("folder synced")
        elif name == "rename" and arguments[1] == tmp_path / "step-000001":
            happened.append("named")
        elif name == "replace" and arguments[1] == tmp_path / "latest":
            happened.append("pointed to")

    before_each(monkeypatch, note)
    save_step(tmp_path, 1)
    assert happened == ["named", "folder synced", "pointed to", "folder synced"]


def count_operations(folder: Path) -> int:
    """How many operations a save consists of."""
    counted: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        before_each(patch, lambda name, _: counted.append(name))
        save_step(folder, 1)
    return len(counted)


def test_a_crash_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    operations = count_operations(tmp_path / "counted")
    for last in range(operations):
        checkpoints = tmp_path / str(last)
        save_step(checkpoints, 1)
        left = iter(range(last))

        def crash(name: str, _: tuple[Any, ...], left: Any = left, last: int = last) -> None:
            if next(left, None) is None:
                raise Crash(f"before operation {last}, {name}")

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash, Exception):
            before_each(patch, crash)
            save_step(checkpoints, 2)
        for folder in saved(checkpoints):
            verify(folder)
        assert verify(find_latest(checkpoints)).step in (1, 2)
