"""The manifest of a checkpoint: what it holds, and the proof that all of it is there; read without torch."""

import contextlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import CheckpointError
from tutti.runs.files import read_json, to_dataclass, write_durably

NAME = "manifest.json"
FORMAT = 1
_SUM = "sum"  # the key of the CRC-32 of all other keys with their values
_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)
_REPLACED = ".replaced"


@dataclass(frozen=True)
class Manifest:
    """Where a run stood when it was saved, the shape of its model, and the size and sum of every file."""

    recipe: str
    step: int
    seed: int
    global_batch: int
    micro_batch: int | None
    train_samples: int
    ranks: int
    model: dict[str, str]  # parameter or buffer -> dtype and shape
    progress: dict[str, Any]  # running sums, best metric, gradient scaler
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # file -> bytes and CRC-32
    order: str = "stored"  # how samples are ordered; manifests of the first versions do not say it
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        content = asdict(self)
        write_durably(folder / NAME, json.dumps(content | {_SUM: _content_sum(content)}, indent=1) + "\n")


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def file_sum(path: Path) -> tuple[int, int]:
    """The size and the CRC-32 of a file."""
    size = total = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            total = zlib.crc32(chunk, total)
            size += len(chunk)
    return size, total


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, or an error that names the folder."""
    try:
        content = read_json(folder / NAME)
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, found {content!r:.40}")
        if content.get("format", FORMAT) != FORMAT:
            raise CheckpointError(f"checkpoint {folder}: format {content['format']}, expected {FORMAT}.")
        expected = content.pop(_SUM, None)  # manifests of the first versions have none
        if expected is not None and expected != _content_sum(content):
            raise ValueError(f"its content does not have the sum {expected!r:.40} that it gives")
        return to_dataclass(content, Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {NAME}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {NAME} cannot be read ({error}).") from error


def _content_sum(content: dict[str, Any]) -> int:
    """The CRC-32 of plain values, however the file that holds them is laid out."""
    return zlib.crc32(json.dumps(content).encode())


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every file is as it was written; otherwise the last good one is offered."""
    try:
        return _check(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_offer(folder)}") from None


def find_latest(checkpoints: Path, warn: Callable[[str], None] = lambda text: None) -> Path:
    """The checkpoint that `latest` names, or the newest complete one where `latest` is damaged or names none."""
    _undo_replacement(checkpoints)
    pointer = checkpoints / "latest"
    try:
        name = pointer.read_text(errors="replace").strip()
    except OSError:
        name = None
    if name and _STEP.fullmatch(name) and (checkpoints / name).is_dir():
        return checkpoints / name
    found = next((folder for folder in reversed(saved(checkpoints)) if _is_complete(folder)), None)
    held = "is missing" if name is None else f"is damaged: it holds {name!r:.40}, expected the name of a checkpoint"
    if found is not None:
        warn(f"warning: {pointer} {held}. The newest complete checkpoint is used: {found.name}")
        return found
    if name is None:
        raise CheckpointError(f"{checkpoints} holds no finished checkpoint to resume from.")
    raise CheckpointError(f"{pointer} {held}. There is no complete checkpoint beside it.")


def find_checkpoint(
    resume: str,
    out: str,
    recipe: str,
    warn: Callable[[str], None] = lambda text: None,
    in_script: bool = False,
) -> Path:
    """Find the checkpoint to resume: of the newest run, of a run folder, or a given one.

    `in_script` says that a script has asked for it, by an argument of `tutti.start`, and not the command line.
    """
    if resume == "latest":
        from tutti.runs.listing import find_runs

        for run in reversed(find_runs(Path(out), recipe)):
            in_study = run.folder.study.exists()  # only the study resumes its points
            if (run.folder.checkpoints / "latest").is_file() and not in_study:
                return find_latest(run.folder.checkpoints, warn)
        start = "Start one without resume" if in_script else f"Start one with: tutti train {recipe}"
        raise CheckpointError(
            f"no run of {recipe!r} in {out!r} has a checkpoint. {start}, "
            "or give the path of a run folder or of a checkpoint."
        )
    path, asked = Path(resume), f"resume={resume!r}" if in_script else f"--resume {resume}"
    if not path.is_dir():
        raise CheckpointError(f"{asked}: no such folder. Give a run folder or one of its checkpoints/step-*.")
    if (path / "checkpoints").is_dir():
        return find_latest(path / "checkpoints", warn)
    if not (path.parent.parent / "config.yaml").is_file():
        raise CheckpointError(f"{asked} is neither a run folder nor a checkpoint inside one.")
    return path


def choose(checkpoints: Path, which: str | int = "best") -> tuple[Path, str]:
    """The checkpoint that is meant by best, last or a step, and a note where the last one stands for the best."""
    if which == "last":
        return find_latest(checkpoints), ""
    if which == "best":
        best = read_pointer(checkpoints / "best")
        if _STEP.fullmatch(best) and (checkpoints / best).is_dir():
            return checkpoints / best, ""
        last = find_latest(checkpoints)
        return last, f"no checkpoint was saved as the best (checkpoint.best): the last one is used, {last.name}"
    steps = {step_of(folder): folder for folder in saved(checkpoints)}
    try:
        return steps[int(which)], ""
    except (KeyError, ValueError):
        known = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"checkpoint {which!r} of {checkpoints.parent}: expected best, last or the step of a saved one ({known})."
        ) from None


def read_pointer(pointer: Path) -> str:
    """The name in `latest` or `best`; empty where there is none."""
    try:
        return pointer.read_text(errors="replace").strip()
    except OSError:
        return ""


def saved(checkpoints: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    return sorted((path for path in checkpoints.glob("step-*") if path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint, -1 for another name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else -1


def replaced_name(folder: Path) -> Path:
    """Where a checkpoint stays while another one of its step takes its name."""
    return folder.with_name(f".{folder.name}{_REPLACED}")


def _undo_replacement(checkpoints: Path) -> None:
    """Give a checkpoint its name back where a crash has kept the one that replaces it from taking it."""
    for aside in checkpoints.glob(f".step-*{_REPLACED}"):
        named = checkpoints / aside.name[1:].removesuffix(_REPLACED)
        with contextlib.suppress(OSError):
            if not named.exists():
                aside.rename(named)


def _is_complete(folder: Path) -> bool:
    """Whether a checkpoint has a readable manifest and files of the right sizes; sums are checked when it is used."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == size for name, (size, _) in files.items())
    except (CheckpointError, OSError):
        return False


def _check(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            if not path.is_file():
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} is missing.")
            found = file_sum(path)
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name}: {error.strerror}.") from error
        if found != tuple(expected):
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {found[0]:,} bytes with sum {found[1]:08x}, "
                f"expected {expected[0]:,} with {expected[1]:08x}."
            )
    return manifest


def _offer(bad: Path) -> str:
    """The newest checkpoint before a bad one that is as it was written, or else the newest after it."""
    others = [folder for folder in reversed(saved(bad.parent)) if folder.name != bad.name]
    earlier = [folder for folder in others if step_of(folder) < step_of(bad)]
    for folder in earlier:
        if _is_good(folder):
            return f" The last good one before it is {folder.name}: --resume {folder}"
    for folder in others:
        if folder not in earlier and _is_good(folder):
            return f" There is no earlier good one; the newest good one is {folder.name}: --resume {folder}"
    return " There is no earlier good one."


def _is_good(folder: Path) -> bool:
    try:
        _check(folder)
    except CheckpointError:
        return False
    return True
