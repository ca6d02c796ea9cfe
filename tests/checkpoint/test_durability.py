"""The order in which a checkpoint becomes durable: content, manifest, name, pointer."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tutti.checkpoint.manifest import NAME, Manifest, find_latest, saved, verify
from tutti.checkpoint.store import check_optimizer, complete, model_shape, resume_from, save, write_state
from tutti.errors import ConfigError, FolderError
from tutti.optim.muon import Muon
from tutti.ranks.group import Group
from tutti.runs.files import write_durably

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


def save_step(checkpoints: Path, step: int, keep: int = 2) -> Manifest:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manifest = Manifest("order", step, 1, 8, None, 64, 1, model_shape(model), {})

    def write(folder: Path, group: Group) -> list[Path]:
        return write_state(folder, model, optimizer, group)

    return save(checkpoints, manifest, write, cast(Group, OneRank()), keep=keep)


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


def crashed_saves(place: Path, step: int, operations: int) -> Iterator[Path]:
    """Folders in which step 1 was saved, and the save of another step has crashed before each of its operations."""
    for last in range(operations):
        checkpoints = place / str(last)
        save_step(checkpoints, 1)
        left = iter(range(last))

        def crash(name: str, _: tuple[Any, ...], left: Any = left, last: int = last) -> None:
            if next(left, None) is None:
                raise Crash(f"before operation {last}, {name}")

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash, Exception):
            before_each(patch, crash)
            save_step(checkpoints, step)
        yield checkpoints


def test_a_crash_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    for checkpoints in crashed_saves(tmp_path, 2, count_operations(tmp_path / "counted")):
        for folder in saved(checkpoints):
            verify(folder)
        assert verify(find_latest(checkpoints)).step in (1, 2)


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    save_step(tmp_path / "counted", 1)
    for checkpoints in crashed_saves(tmp_path, 1, count_operations(tmp_path / "counted")):
        assert verify(find_latest(checkpoints)).step == 1
        assert [folder.name for folder in saved(checkpoints)] == ["step-000001"]


def test_a_run_that_goes_back_keeps_its_new_checkpoints_and_drops_the_later_ones_once_it_has_saved(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep=3)
    write_durably(tmp_path / "best", "step-000030\n")
    (tmp_path / ".step-000040.partial").mkdir()
    assert resume_from(tmp_path / "step-000010") == [20, 30]
    assert [folder.name for folder in saved(tmp_path)] == ["step-000010", "step-000020", "step-000030"], "not yet"
    assert find_latest(tmp_path).name == "step-000010", "a crash here resumes from where the run was taken back to"
    save_step(tmp_path, 15, keep=3)
    assert [folder.name for folder in saved(tmp_path)] == ["step-000010", "step-000015"]
    assert not (tmp_path / "best").exists(), "it named a checkpoint of the part that was given up"
    for step in (20, 25):
        save_step(tmp_path, step, keep=3)
    assert [folder.name for folder in saved(tmp_path)] == ["step-000015", "step-000020", "step-000025"]
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_the_results_of_an_epoch_are_added_to_its_checkpoint(tmp_path: Path) -> None:
    sealed = save_step(tmp_path, 1)
    complete(tmp_path, replace(sealed, progress={"results": {"valid_loss": 0.5}}), is_best=True)
    assert verify(tmp_path / "step-000001").progress == {"results": {"valid_loss": 0.5}}
    assert (tmp_path / "best").read_text() == "step-000001\n"


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    model = nn.Linear(3, 2)
    check_optimizer(tmp_path / "step-000001", model, torch.optim.SGD(model.parameters(), lr=0.5), "sgd")
    with pytest.raises(ConfigError) as refused:
        check_optimizer(tmp_path / "step-000001", model, torch.optim.Adam(model.parameters()), "adam")
    assert str(refused.value) == (
        f"optim.name='adam' with checkpoint {tmp_path / 'step-000001'}: for each parameter the checkpoint holds "
        "nothing, and the optimizer of this run needs exp_avg, exp_avg_sq, step. "
        "Resume without overrides of optim.*, or start a new run."
    )


def test_a_checkpoint_of_an_optimizer_for_other_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    others = torch.optim.SGD([model.bias], lr=0.1)
    write_state(tmp_path, model, Muon([model.weight], lr=0.1, others=others), cast(Group, OneRank()))
    check_optimizer(tmp_path, model, Muon([model.weight], lr=0.5, others=others), "muon")
    with pytest.raises(ConfigError, match="the checkpoint does not hold momentum of bias, which the optimizer of this"):
        check_optimizer(tmp_path, model, Muon(model.parameters(), lr=0.1), "muon")


def test_a_deleted_run_folder_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(FolderError, match=f"the run folder {run} was deleted: checkpoint step-000003 was not saved"):
        save_step(run / "checkpoints", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_removes_what_a_killed_process_has_left(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    save_step(checkpoints, 3)
    for left in (
        checkpoints / ".latest.15",
        tmp_path / ".record.json.15",
        checkpoints / "step-000003" / ".manifest.json.15",
    ):
        left.write_text("")
    resume_from(checkpoints / "step-000003")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000003"]
    assert list(tmp_path.iterdir()) == [checkpoints]
    assert not (checkpoints / "step-000003" / ".x.json.15").exists()
