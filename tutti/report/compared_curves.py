"""The curves of several runs in one picture, by step and by time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tutti.report.runs import Mark, RunOutcome

# Okabe and Ito's colours, which all eyes can tell apart; more runs than colours differ by their strokes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
_STROKES = ("-", "--", ":", "-.")


def draw_comparison(runs: Mapping[str, RunOutcome], path: Path) -> Path:
    """Draw the loss and the first metric of all runs, over steps on the left and over time on the right."""
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


def _metrics(runs: Mapping[str, RunOutcome]) -> list[str]:
    found = dict.fromkeys(key for run in runs.values() for mark in run.epochs for key in mark.values)
    names = [key.removeprefix("valid_") for key in found if key.startswith("valid_")]
    return [name for name in names if name != "loss"]


def _draw(axes: Axes, name: str, run: RunOutcome, place: int, where: Callable[[Mark], float]) -> None:
    windows = [mark for mark in run.windows if name in mark.values]
    epochs = [mark for mark in run.epochs if f"valid_{name}" in mark.values]
    values = [mark.values[name] for mark in windows]
    axes.plot([where(mark) for mark in windows], values, linewidth=0.9, alpha=0.6, **_style(place))
    values = [mark.values[f"valid_{name}"] for mark in epochs]
    axes.plot([where(mark) for mark in epochs], values, marker="o", markersize=3.5, **_style(place))
    axes.grid(alpha=0.3)


def _style(place: int) -> dict[str, Any]:
    return {"color": _COLOURS[place % len(_COLOURS)], "linestyle": _STROKES[place // len(_COLOURS) % len(_STROKES)]}
