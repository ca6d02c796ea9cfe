"""The run folder: made once for each run, refused where it cannot be, and ready to run again."""

import os
import sys
from datetime import datetime
from pathlib import Path

import pytest
from conftest import REPOSITORY, command

from tutti.config.load import resolve
from tutti.errors import FolderError
from tutti.runs import folder as module
from tutti.runs.folder import RunFolder, check_writable, create_folder, write_config


class Noon(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: object = None) -> "Noon":
        return cls(2026, 11, 15, 12, 0, 5)


@pytest.fixture
def in_the_way(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("mine")
    return path


def refusal(call: object, *arguments: object) -> str:
    with pytest.raises(FolderError) as caught:
        call(*arguments)  # type: ignore[operator]
    return str(caught.value)


def test_a_folder_is_named_by_recipe_time_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "datetime", Noon)
    made = create_folder(str(tmp_path / "runs"), "mnist/keras", 4)
    assert made.path == tmp_path / "runs" / "mnist" / "keras" / "2026-11-15_120005_n4"
    assert sorted(path.name for path in made.path.iterdir()) == ["checkpoints", "logs"]
    places = (made.config, made.record, made.metrics, made.tensorboard, made.curves, made.log(3), made.ledger(3))
    assert [str(place.relative_to(made.path)) for place in places] == [
        "config.yaml",
        "record.json",
        "metrics.jsonl",
        "tensorboard",
        "curves.png",
        "logs/rank-3.log",
        "logs/ledger-3.jsonl",
    ]


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "datetime", Noon)
    names = [create_folder(str(tmp_path), "digits", 2).path.name for _ in range(3)]
    assert names == ["2026-11-15_120005_n2", "2026-11-15_120005_n2-2", "2026-11-15_120005_n2-3"]
    assert create_folder(str(tmp_path), "digits", 3).path.name == "2026-11-15_120005_n3"


def test_a_file_in_the_way_is_refused_with_its_name(in_the_way: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").touch()
    for out, place in ((in_the_way, in_the_way), (in_the_way / "below", in_the_way), (tmp_path / "runs", "digits")):
        message = refusal(create_folder, str(out), "digits", 1)
        assert message.startswith("run folder ") and str(place) in message and ": cannot be written: " in message
        assert message.endswith("Choose another place with out=FOLDER.")
    assert in_the_way.read_text() == "mine"


def test_a_place_that_is_no_folder_is_refused_before_anything_starts(in_the_way: Path) -> None:
    for out in (in_the_way, in_the_way / "below" / "deeper"):
        assert refusal(check_writable, str(out)) == (
            f"out={str(out)!r}: {in_the_way} is not a folder. Choose another place with out=FOLDER."
        )


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that not even root can write")
def test_a_place_that_cannot_be_written_is_refused_even_for_root() -> None:
    message = refusal(check_writable, "/proc/runs")
    assert message.startswith("out='/proc/runs': /proc cannot be written")
    assert message.endswith("Choose another place with out=FOLDER.")
    assert refusal(create_folder, "/proc/runs", "digits", 1).startswith("run folder /proc/runs")


@pytest.mark.system
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    call = f"from tutti.runs.folder import check_writable; check_writable({str(tmp_path / 'runs')!r})"
    as_others = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []  # root may write anywhere
    done = command(*as_others, sys.executable, "-c", call, cwd=REPOSITORY)
    tmp_path.chmod(0o700)
    assert done.err.splitlines()[-1] == (
        f"tutti.errors.FolderError: out={str(tmp_path / 'runs')!r}: {tmp_path} cannot be written by this user. "
        "Choose another place with out=FOLDER."
    )


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in ("runs", "./a/b", str(tmp_path), ".", str(tmp_path / "new")):
        check_writable(out)
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_says_how_to_run_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_config(folder, resolve("mnist/large_batch").config.as_yaml())
    assert folder.config.read_text().splitlines()[0] == f"# Run again: tutti train {tmp_path / 'config.yaml'}"
    assert resolve(str(folder.config)).config == resolve("mnist/large_batch").config
