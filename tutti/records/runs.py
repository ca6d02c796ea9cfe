"""Run folders found again: one row for each, newest last."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tutti.records.folder import RunFolder
from tutti.records.metrics import read_events
from tutti.records.record import read_record, state_of


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
    )
