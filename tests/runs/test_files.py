"""Files that are whole or not there, whatever happens while they are written."""

import errno
import os
from pathlib import Path

import pytest

from tutti.runs.files import remove_unfinished, sync_path, write_durably


def test_a_file_is_written_and_replaced_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    for text in ("first\n", "second, longer\n", "", "ü\n"):
        write_durably(path, text)
        assert path.read_text() == text
        assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = {"record.json", ".hidden", "step-000010", ".job.lock", ".job.json.15", "run.15"}
    for name in (*kept, ".record.json.15", ".latest.4711"):
        (tmp_path / name).write_text("")
    (tmp_path / ".folder.15").mkdir()
    remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept | {".folder.15"}


def test_the_new_content_is_on_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    happened: list[tuple[str, str, str]] = []

    def note(what: str, name: str, real: object) -> None:
        def call(*arguments: object) -> object:
            aside = next((p for p in tmp_path.iterdir() if p != path), None)
            happened.append((what, path.read_text(), aside.read_text() if aside else ""))
            return real(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(os, name, call)

    note("sync", "fsync", os.fsync)
    note("move", "replace", os.replace)
    write_durably(path, "new")
    assert happened == [("sync", "old", "new"), ("move", "old", "new"), ("sync", "new", "")]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "file.txt"
    write_durably(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space left on device"):
        write_durably(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_durably(folder, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (folder / "inner").is_dir()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_durably(tmp_path / "absent" / "file", "text")
    with pytest.raises(FileNotFoundError):
        sync_path(tmp_path / "absent")


def test_text_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_durably(tmp_path / "file", "\ud800")
    assert list(tmp_path.iterdir()) == []
