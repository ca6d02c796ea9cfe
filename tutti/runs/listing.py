"""Run folders found again: one row for each, and short names for them."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tutti.errors import FolderError, nearest
from tutti.runs.folder import RunFolder
from tutti.runs.metrics import read_events
from tutti.runs.record import read_record, state_of


def list_folders(out: Path) -> list[RunFolder]:
    """The folders of all runs below a folder, by their records alone."""
    return [folder for path in sorted(out.rglob("record.json")) if _is_run(folder := RunFolder(path.parent))]


def name_runs(folders: Iterable[RunFolder]) -> dict[str, RunFolder]:
    """Runs by names that say what they are: recipe, start and ranks; or recipe, study and point."""
    named: dict[str, RunFolder] = {}
    for folder in folders:
        name, number = _name(folder), 1
        while (unique := name if number == 1 else f"{name}-{number}") in named:
            number += 1
        named[unique] = folder
    return named


def find_run(given: str, out: Path) -> RunFolder:
    """The run that is meant by a folder, a folder below `out`, the last part of one, or a short name."""
    for path in (Path(given), out / given):
        folder = RunFolder(path.parent if path.is_file() else path)
        if _is_run(folder):
            return folder
    named = name_runs(list_folders(out))
    found = [folder for name, folder in named.items() if given in (name, folder.path.name)]
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(str(folder.path) for folder in found)
        raise FolderError(f"{given!r} may be any of {places}: give the folder of the one that is meant.")
    if Path(given).is_dir():
        below = len(list_folders(Path(given)))
        holds = f"holds {below} runs and is none itself" if below else "is no run that has begun to train"
        raise FolderError(f"{given} {holds}: expected a run folder, as `tutti runs` lists them.")
    known = [*named, *(folder.path.name for folder in named.values())]
    raise FolderError(
        f"there is no run {given!r}, here or in {out}: expected a run folder, as `tutti runs` lists them. "
        f"Give its path where it lies elsewhere.{nearest(given, known)}"
    )


def _is_run(folder: RunFolder) -> bool:
    content = read_record(folder.record)
    return content is not None and content.get("kind", "train") == "train"  # what was only measured is no run


def _name(folder: RunFolder) -> str:
    """The recipe with the run folder's own name, which tells start and ranks; for a point also the study's."""
    recipe = str((read_record(folder.record) or {}).get("recipe", "run"))
    recipe = "/".join(word for word in recipe.split("/") if word.strip("."))
    path = folder.path.resolve()
    study = path.parent.parent
    if path.parent.name == "points" and (study / "study.json").is_file():
        return f"{recipe}_{study.name}/{path.name}"
    return f"{recipe}_{path.name}"


@dataclass(frozen=True)
class RunSummary:
    """What a table of runs shows of one."""

    folder: RunFolder
    recipe: str
    state: str
    ranks: int
    started: str
    epochs: int
    metrics: dict[str, float]
    samples_per_second: float | None
    global_batch: int | None = None
    training_seconds: float | None = None  # until now, or until it ended
    memory: dict[str, int] = field(default_factory=dict)  # predicted_peak_bytes and measured_peak_bytes of a rank


def find_runs(out: Path, recipe: str | None = None) -> list[RunSummary]:
    """Every run below a folder, of one recipe or of all, in the order in which they started."""
    found = [summarise(RunFolder(path.parent)) for path in out.rglob("record.json")]
    runs = [run for run in found if run and recipe in (None, run.recipe)]
    return sorted(runs, key=lambda run: (_seconds(run.started), run.folder.path.name))


def _seconds(started: str) -> float:
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return 0.0


def read_state(folder: RunFolder) -> str | None:
    """The state of the run in a folder; None where it has none yet."""
    content = read_record(folder.record)
    return None if content is None else state_of(content)


def summarise(folder: RunFolder) -> RunSummary | None:
    """One run's row, or None where its record cannot be read."""
    content = read_record(folder.record)
    if content is None or content.get("kind", "train") != "train":  # what was only measured is no run
        return None
    last: dict[str, Any] = {}
    seconds = None
    for event in read_events(folder.metrics):
        if event.get("event") == "epoch":
            last = event
        elif event.get("event") == "step" and event.get("seconds") is not None:
            seconds = (seconds or 0.0) + event["seconds"]
    return RunSummary(
        folder=folder,
        recipe=content.get("recipe") or "?",
        state=state_of(content),
        ranks=content.get("ranks") or 0,
        started=content.get("started") or "",
        epochs=last.get("epoch", 0),
        metrics={key: value for key, value in last.items() if key.startswith("valid_")},
        samples_per_second=last.get("samples_per_second"),
        global_batch=(content.get("plan") or {}).get("global_batch"),
        training_seconds=seconds,
        memory=content.get("memory") or {},
    )


FOLDER = ".board"


def find_events(out: Path) -> dict[str, Path]:
    """By short name, the folders of events of the runs below a folder."""
    found = name_runs(folder for folder in list_folders(out) if folder.tensorboard.is_dir())
    return {name: folder.tensorboard for name, folder in found.items()}


def link_events(board: Path, events: dict[str, Path]) -> None:
    """Have the board hold a link for each run and no other; links that are right already stay untouched."""
    board.mkdir(exist_ok=True)
    wanted = {board / name: folder for name, folder in events.items()}
    for link in _links(board):
        if link not in wanted:
            link.unlink(missing_ok=True)
    for link, folder in wanted.items():
        target = os.path.relpath(folder.resolve(), link.parent.resolve())
        if link.is_symlink():
            if os.readlink(link) == target:
                continue
            link.unlink()
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another board has just made it
            link.symlink_to(target, target_is_directory=True)


def _links(board: Path) -> list[Path]:
    return [path for path in board.rglob("*") if path.is_symlink()]
