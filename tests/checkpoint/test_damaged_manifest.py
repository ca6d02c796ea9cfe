"""A manifest that is damaged in any way is refused, or says what was written."""

import dataclasses
import json
import tempfile
import zlib
from pathlib import Path

import pytest
from damage import changed, damaged, damaged_json, many, read_or_refuse
from hypothesis import given

from tutti.checkpoint.manifest import NAME, Manifest, find_latest, read_manifest, verify
from tutti.errors import CheckpointError

PROGRESS = {"window": [1.5, 64.0], "best": 0.5, "results": {"valid_loss": 1.25}, "scaler": {}}
SHAPE = {"layer.weight": "float32 [3, 4]"}


FILE = b"weights"
MADE = Manifest("digits", 400, 42, 64, 16, 1437, 2, SHAPE, PROGRESS, files={"one.bin": (len(FILE), zlib.crc32(FILE))})


def content_of(manifest: Manifest) -> bytes:
    """The bytes of a manifest's file."""
    with tempfile.TemporaryDirectory() as folder:
        manifest.write(Path(folder))
        return Path(folder, NAME).read_bytes()


CONTENT = content_of(MADE)


def checkpoint(parent: Path, content: bytes) -> Path:
    """A checkpoint of one file with a manifest of that content."""
    folder = parent / "step-000400"
    folder.mkdir(exist_ok=True)
    (folder / "one.bin").write_bytes(FILE)
    (folder / NAME).write_bytes(content)
    return folder


@many(200)
@given(content=damaged(CONTENT))
def test_a_damaged_manifest_is_refused_or_says_what_was_written(tmp_path: Path, content: bytes) -> None:
    folder = checkpoint(tmp_path, content)
    found = read_or_refuse(lambda: verify(folder), folder)
    assert found is None or found == MADE


@many(100)
@given(content=changed(json.loads(CONTENT)))
def test_a_manifest_with_another_value_is_refused_or_says_what_was_written(tmp_path: Path, content: object) -> None:
    folder = checkpoint(tmp_path, json.dumps(content).encode())
    found = read_or_refuse(lambda: verify(folder), folder)
    assert found is None or found == MADE


@many(100)
@given(content=damaged_json({key: value for key, value in json.loads(CONTENT).items() if key != "sum"}))
def test_a_manifest_without_a_sum_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    folder = checkpoint(tmp_path, content)
    read_or_refuse(lambda: verify(folder), folder)


def test_a_manifest_of_the_first_version_has_no_sum(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, json.dumps(dataclasses.asdict(MADE)).encode())
    assert read_manifest(folder) == MADE


@many(60)
@given(content=damaged(b"step-000400\n"))
def test_a_damaged_pointer_is_refused_or_names_a_checkpoint(tmp_path: Path, content: bytes) -> None:
    checkpoint(tmp_path, CONTENT)
    (tmp_path / "latest").write_bytes(content)
    found = read_or_refuse(lambda: find_latest(tmp_path), tmp_path / "latest")
    assert found is None or (found.parent == tmp_path and found.name.startswith("step-"))


def test_where_the_pointer_is_damaged_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, CONTENT)
    (tmp_path / "step-²").mkdir()
    (tmp_path / "step-000500").mkdir()  # without a manifest
    for content in (b"\0\0\0", b"../..", b"/", b"step-\xff", b"", b"step-000001", b"step-000900"):
        (tmp_path / "latest").write_bytes(content)
        said: list[str] = []
        assert find_latest(tmp_path, said.append) == folder
        assert len(said) == 1 and "latest is damaged: it holds " in said[0] and said[0].endswith(": step-000400")
    (tmp_path / "latest").unlink()
    assert find_latest(tmp_path) == folder
    (folder / "one.bin").write_bytes(b"")
    (tmp_path / "latest").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"it holds 'nonsense', .* There is no complete checkpoint beside it\."):
        find_latest(tmp_path)
