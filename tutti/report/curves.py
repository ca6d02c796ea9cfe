"""Draws curves.png of a run, and the curves of several runs in one picture."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from tutti import units
from tutti.config.schedule import Schedule
from tutti.report.style import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, STROKES, VERMILION, plt
from tutti.runs.folder import RunFolder
from tutti.runs.metrics import NOISE, is_number, read_events
from tutti.runs.record import read_record

if TYPE_CHECKING:
    from tutti.report.runs import Mark, RunOutcome


def draw_curves(folder: RunFolder) -> Path | None:
    """Draws curves.png in the run folder; returns None if no step was logged."""
    events = list(read_events(folder.metrics))
    steps = [event for event in events if event.get("event") == "step"]
    epochs = [event for event in events if event.get("event") in ("start", "epoch")]
    if not steps:
        return None
    record = read_record(folder.record) or {}
    metrics = [key.removeprefix("valid_") for key in epochs[-1] if key.startswith("valid_")] if epochs else []
    others = [name for name in metrics if name != "loss"]
    measured = any(event.get("event") == NOISE for event in events)
    count = 3 + bool(others) + measured
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.4), layout="constrained")
    panels = iter(axes)
    _plot_pair(next(panels), "loss", steps, epochs)
    for name in others[:1]:
        _plot_pair(next(panels), name, steps, epochs)
    _plot(next(panels), steps, "lr", "learning rate")
    speed = next(panels)
    _plot(speed, steps, "samples_per_second", "samples/s")
    speed.set_ylim(bottom=0)
    if measured:
        _plot_noise(next(panels), folder)
    ranks = f", {units.count(record['ranks'], 'rank')}" if "ranks" in record else ""
    figure.suptitle(f"{record.get('recipe', folder.path.name)}{ranks}", fontsize=11)
    figure.savefig(folder.curves, dpi=110)
    plt.close(figure)
    return folder.curves


def draw_schedule(schedule: Schedule, steps_per_epoch: int, path: Path) -> None:
    """Draws the learning rate over all steps."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot([schedule.lr_at(step) for step in range(schedule.total_steps)])
    axes.set(xlabel=f"step ({steps_per_epoch:,} per epoch)", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_pair(axes: Axes, name: str, steps: list[dict[str, Any]], epochs: list[dict[str, Any]]) -> None:
    """Plots a metric on training batches as a line and on validation data as marks."""
    _plot(axes, steps, name, name, label="training", alpha=0.6)
    valid = [event for event in epochs if "step" in event and f"valid_{name}" in event]
    axes.plot([e["step"] for e in valid], [e[f"valid_{name}"] for e in valid], "o-", ms=3, label="validation")
    axes.legend(fontsize=8)


def _plot_noise(axes: Axes, folder: RunFolder) -> None:
    """Plots the gradient noise scale over training with its 90 % interval; an arrow where only a lower end is known."""
    from tutti.runs.noise_scale import noise_curve

    curve = noise_curve(folder.path)
    known = [(step, scale.value, scale.low, scale.high) for step, scale in curve if scale.value and scale.high]
    if known:
        steps, values, lows, highs = zip(*known, strict=True)
        axes.vlines(steps, lows, highs, color=BLUE, alpha=0.4, linewidth=2)
        axes.plot(steps, values, "o", ms=4, color=BLUE, label="with 90 % interval")
    if open_ended := [(step, scale.low) for step, scale in curve if scale.value is None]:
        axes.plot(*zip(*open_ended, strict=True), "^", ms=5, color=VERMILION, label="larger than")
    if curve:
        axes.axhline(curve[-1][1].batch, color=BLACK, linewidth=0.8, linestyle=":", label="global batch")
        axes.set_yscale("log")
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "too few steps", ha="center", va="center", transform=axes.transAxes)
    axes.set(xlabel="step", title="gradient noise scale (samples)")
    axes.grid(alpha=0.3)


def _plot(axes: Axes, events: list[dict[str, Any]], key: str, title: str, **style: Any) -> None:
    known = [event for event in events if "step" in event and is_number(event.get(key))]
    axes.plot([event["step"] for event in known], [event[key] for event in known], **style)
    axes.set(xlabel="step", title=title)
    axes.grid(alpha=0.3)


_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, BLACK)  # further runs differ by their line style


def draw_comparison(runs: Mapping[str, "RunOutcome"], path: Path) -> Path:
    """Draws the loss and the first metric of all runs, over steps on the left and over time on the right."""
    names = ["loss", *_metrics(runs)[:1]]
    figure, axes = plt.subplots(
        len(names), 2, figsize=(11, 3.4 * len(names) + 0.3), layout="constrained", squeeze=False, sharey="row"
    )
    try:
        for name, (by_step, by_time) in zip(names, axes, strict=True):
            for place, run in enumerate(runs.values()):
                _draw(by_step, name, run, place, lambda mark: mark.step)
                _draw(by_time, name, run, place, lambda mark: mark.seconds)
            by_step.set(xlabel="step", ylabel=name, title=f"{name} by step")
            by_time.set(xlabel="seconds of training", title=f"{name} by time")
        labels = [plt.Line2D([], [], **_style(place)) for place in range(len(runs))]
        columns = 1 if max(map(len, runs)) > 60 else 2
        figure.legend(labels, list(runs), loc="outside lower center", ncols=columns, fontsize=8)
        figure.suptitle("training: thin lines; validation: marks", fontsize=10)
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)
    return path


def _metrics(runs: Mapping[str, "RunOutcome"]) -> list[str]:
    found = dict.fromkeys(key for run in runs.values() for mark in run.epochs for key in mark.values)
    names = [key.removeprefix("valid_") for key in found if key.startswith("valid_")]
    return [name for name in names if name != "loss"]


def _draw(axes: Axes, name: str, run: "RunOutcome", place: int, where: Callable[["Mark"], float]) -> None:
    windows = [mark for mark in run.windows if name in mark.values]
    epochs = [mark for mark in run.epochs if f"valid_{name}" in mark.values]
    values = [mark.values[name] for mark in windows]
    axes.plot([where(mark) for mark in windows], values, linewidth=0.9, alpha=0.6, **_style(place))
    values = [mark.values[f"valid_{name}"] for mark in epochs]
    axes.plot([where(mark) for mark in epochs], values, marker="o", markersize=3.5, **_style(place))
    axes.grid(alpha=0.3)


def _style(place: int) -> dict[str, Any]:
    return {"color": _COLOURS[place % len(_COLOURS)], "linestyle": STROKES[place // len(_COLOURS) % len(STROKES)]}
