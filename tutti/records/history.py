"""The epochs of a run summed up for its record: what each came to, the best, the time they took."""

import math
from pathlib import Path
from typing import Any

from tutti.records.metrics import read_events

_KEPT = ("epoch", "ranks", "train_loss", "samples_per_second", "seconds")


def summarise_epochs(metrics: Path, ranks: int) -> dict[str, Any]:
    """The history of a run with the number of ranks, the best value of each validation metric, the mean epoch."""
    events = [event for event in read_events(metrics) if event.get("event") == "epoch"]
    if not events:
        return {}
    history = [_entry({"ranks": ranks} | event) for event in events]
    seconds = [entry["seconds"] for entry in history if entry.get("seconds")]
    mean = round(sum(seconds) / len(seconds), 3) if seconds else None
    return {"history": history, "best": _best(history), "seconds_per_epoch": mean}


def _entry(event: dict[str, Any]) -> dict[str, Any]:
    return {key: event[key] for key in event if key in _KEPT or key.startswith("valid_")}


def _best(history: list[dict[str, Any]]) -> dict[str, Any]:
    """By metric, the best value and its first epoch: the least of a loss or an error; what is no number is none."""
    found = {}
    for name in (name for name in history[-1] if name.startswith("valid_")):
        known = [entry for entry in history if name in entry and not math.isnan(entry[name])]
        if known:
            sign = 1 if name.endswith(("loss", "error")) else -1
            best = min(known, key=lambda entry: sign * entry[name])
            found[name] = {"value": best[name], "epoch": best.get("epoch")}
    return found
