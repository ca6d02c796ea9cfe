"""curves.png: loss, metrics, learning rate and speed of a run, drawn from its run folder."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tutti.optim.schedule import Schedule
from tutti.records.folder import RunFolder
from tutti.records.metrics import is_number, read_events
from tutti.records.record import read_record


def draw_curves(folder: RunFolder) -> Path | None:
    """Draw a run's curves beside its record; nothing where it has not logged a step yet."""
    events = list(read_events(folder.metrics))
    steps = [event for event in events if event.get("event") == "step"]
    epochs = [event for event in events if event.get("event") in ("start", "epoch")]
    if not steps:
        return None
    record = read_record(folder.record) or {}
    metrics = [key.removeprefix("valid_") for key in epochs[-1] if key.startswith("valid_")] if epochs else []
    others = [name for name in metrics if name != "loss"]
    figure, axes = plt.subplots(1, 3 + bool(others), figsize=(4.2 * (3 + bool(others)), 3.4), layout="constrained")
    panels = iter(axes)
    _plot_pair(next(panels), "loss", steps, epochs)
    for name in others[:1]:
        _plot_pair(next(panels), name, steps, epochs)
    _plot(next(panels), steps, "lr", "learning rate")
    speed = next(panels)
    _plot(speed, steps, "samples_per_second", "samples/s")
    speed.set_ylim(bottom=0)
    figure.suptitle(f"{record.get('recipe', folder.path.name)}, {record.get('ranks', '?')} rank(s)", fontsize=11)
    figure.savefig(folder.curves, dpi=110)
    plt.close(figure)
    return folder.curves


def draw_schedule(schedule: Schedule, steps_per_epoch: int, path: Path) -> None:
    """Draw the learning rate over all steps."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot([schedule.lr_at(step) for step in range(schedule.total_steps)])
    axes.set(xlabel=f"step ({steps_per_epoch:,} an epoch)", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_pair(axes: Axes, name: str, steps: list[dict[str, Any]], epochs: list[dict[str, Any]]) -> None:
    """A metric on training batches as a thin line, on validation as marks."""
    _plot(axes, steps, name, name, label="training", alpha=0.6)
    valid = [event for event in epochs if "step" in event and f"valid_{name}" in event]
    axes.plot([e["step"] for e in valid], [e[f"valid_{name}"] for e in valid], "o-", ms=3, label="validation")
    axes.legend(fontsize=8)


def _plot(axes: Axes, events: list[dict[str, Any]], key: str, title: str, **style: Any) -> None:
    known = [event for event in events if "step" in event and is_number(event.get(key))]
    axes.plot([event["step"] for event in known], [event[key] for event in known], **style)
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)
