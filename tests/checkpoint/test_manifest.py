"""A checkpoint is good when every byte of it is; otherwise the last good one is offered."""

import json
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest

from tutti.checkpoint import manifest as module
from tutti.checkpoint.manifest import NAME, Manifest, file_sum, find_latest, folder_name, read_manifest, saved, verify
from tutti.errors import CheckpointError

FILES = {"one.bin": b"weights" * 1000, "two.bin": b"", "three.bin": bytes(range(256))}


def make(checkpoints: Path, step: int) -> Path:
    """A whole checkpoint."""
    folder = checkpoints / folder_name(step)
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    sums = {name: file_sum(folder / name) for name in FILES}
    shape = {"layer.weight": "float32 [3, 4]"}
    Manifest("digits", step, 42, 64, 16, 1437, 2, shape, {"best": 0.5}, files=sums).write(folder)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    return str(caught.value)


def test_a_whole_checkpoint_gives_back_its_manifest(tmp_path: Path) -> None:
    folder = make(tmp_path, 400)
    manifest = verify(folder)
    assert manifest == read_manifest(folder)
    assert asdict(manifest) | {"files": {}} == {
        "recipe": "digits",
        "step": 400,
        "seed": 42,
        "global_batch": 64,
        "micro_batch": 16,
        "train_samples": 1437,
        "ranks": 2,
        "model": {"layer.weight": "float32 [3, 4]"},
        "progress": {"best": 0.5},
        "files": {},
        "order": "stored",
        "format": 1,
    }
    assert manifest.files.keys() == FILES.keys()


def test_a_sum_is_the_size_and_the_crc_of_all_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * (40_000)  # more than one block
    (tmp_path / "file").write_bytes(content)
    assert file_sum(tmp_path / "file") == (len(content), zlib.crc32(content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path, 400)
    (folder / "one.bin").unlink()
    assert refusal(folder) == (f"checkpoint {folder} is damaged: one.bin is missing. There is no earlier good one.")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("one.bin", FILES["one.bin"][:-1]),
        ("one.bin", FILES["one.bin"] + b"\0"),
        ("one.bin", FILES["one.bin"].replace(b"weights", b"Weights", 1)),
        ("two.bin", b"\0"),
        ("three.bin", b""),
    ],
)
def test_a_changed_or_truncated_file_is_named_with_what_was_expected(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make(tmp_path, 400)
    (folder / name).write_bytes(content)
    size, crc = len(FILES[name]), zlib.crc32(FILES[name])
    assert refusal(folder) == (
        f"checkpoint {folder} is damaged: {name} has {len(content):,} bytes with sum {zlib.crc32(content):08x}, "
        f"expected {size:,} with {crc:08x}. There is no earlier good one."
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"format": 1}', '{"format": 1, "unknown": 2}'])
def test_a_manifest_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path, 400)
    (folder / NAME).write_text(text)
    assert refusal(folder).startswith(f"checkpoint {folder} is damaged: {NAME} cannot be read (")


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 400)
    content = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(content | {"format": 2}))
    assert refusal(folder).startswith(f"checkpoint {folder}: format 2, expected 1.")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert refusal(folder) == (f"{folder} is not a checkpoint: it has no {NAME}. There is no earlier good one.")


def test_the_last_good_checkpoint_before_a_damaged_one_is_offered(tmp_path: Path) -> None:
    folders = [make(tmp_path, step) for step in (100, 200, 300, 400, 500)]
    for folder in folders[2:4]:
        (folder / "one.bin").write_bytes(b"")
    for damaged in folders[2:4]:
        assert refusal(damaged).endswith(f" The last good one before it is step-000200: --resume {folders[1]}")
    verify(folders[1])
    verify(folders[4])


def test_many_damaged_checkpoints_are_each_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make(tmp_path, step) for step in range(1, 13)]
    for folder in folders:
        (folder / "one.bin").unlink()
    read: list[Path] = []

    def reading(folder: Path) -> Manifest:
        read.append(folder)
        return read_manifest(folder)

    monkeypatch.setattr(module, "read_manifest", reading)
    assert refusal(folders[-1]).endswith("There is no earlier good one.")
    assert len(read) <= 2 * len(folders)


def test_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    steps = [5, 1_000_000, 400, 999_999, 12_345_678]
    for step in steps:
        make(tmp_path, step)
    (tmp_path / ".step-000500.partial").mkdir()
    (tmp_path / "latest").write_text("step-000400\n")
    assert [int(folder.name.removeprefix("step-")) for folder in saved(tmp_path)] == sorted(steps)


def test_a_good_checkpoint_is_offered_past_a_million_steps_too(tmp_path: Path) -> None:
    good, damaged = make(tmp_path, 999_999), make(tmp_path, 1_000_000)
    (damaged / "one.bin").unlink()
    assert refusal(damaged).endswith(f" The last good one before it is step-999999: --resume {good}")


def test_the_latest_checkpoint_is_the_one_that_the_pointer_names(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_latest(tmp_path)
    assert str(caught.value) == f"{tmp_path} holds no finished checkpoint to resume from."
    for step in (100, 200, 300):
        make(tmp_path, step)
    (tmp_path / "latest").write_text("step-000200\n")
    assert find_latest(tmp_path) == tmp_path / "step-000200"


def test_names_of_checkpoints_have_their_step() -> None:
    assert [folder_name(step) for step in (0, 400, 1_234_567)] == ["step-000000", "step-000400", "step-1234567"]
