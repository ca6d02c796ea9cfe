"""bench.png: where the time of a step goes, as stacked bars, from measurements alone."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tutti.bench.results import Measurement
from tutti.bench.shares import find_shares
from tutti.runs.step_parts import StepPart

# Okabe and Ito's colours, which all eyes can tell apart; hatches for print.
COLOURS = {
    StepPart.DATA: ("#E69F00", ""),
    StepPart.COMPUTE: ("#0072B2", ""),
    StepPart.COMMUNICATION: ("#009E73", "//"),
    StepPart.STRAGGLER: ("#D55E00", "\\\\"),
    StepPart.OTHER: ("#BBBBBB", ""),
}
_ALONE = {
    "read": StepPart.DATA,
    "copy": StepPart.DATA,
    "compute": StepPart.COMPUTE,
    "exchange": StepPart.COMMUNICATION,
}
_NAMES = {
    "read": "read",
    "copy": "copy to GPU",
    "compute": "compute",
    "exchange": "exchange",
    "communicate": "compute +\ncommunicate",
}


def draw_phases(found: Sequence[Measurement], path: Path) -> Path:
    """One measurement with its phases alone and its ranks, or several side by side."""
    if len(found) == 1:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained", width_ratios=(3, 2))
        _draw_one(left, found[0])
        _draw_ranks(right, found[0])
    else:
        figure, axes = plt.subplots(figsize=(max(6.0, 1.3 * len(found) + 2), 4), layout="constrained")
        _draw_several(axes, found)
    first = found[0]
    recipe = first.settings.get("recipe", "")
    figure.suptitle(f"{recipe}: {first.ranks} rank(s) on {first.device_name}, {first.trials} trials", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_one(axes: Axes, measurement: Measurement) -> None:
    """The phases alone, then the whole step in its parts."""
    shares = find_shares(measurement)
    names = [name for name in _NAMES if name in shares.alone]
    for place, name in enumerate(names):
        figure = shares.alone[name]
        colour, hatch = COLOURS[_ALONE.get(name, StepPart.COMPUTE)]
        axes.bar(place, figure.median * 1e3, color=colour, hatch=hatch, alpha=0.55, edgecolor="white")
        if name == "communicate":
            more = figure.median - shares.alone["compute"].median
            colour, hatch = COLOURS[StepPart.COMMUNICATION]
            axes.bar(
                place, more * 1e3, bottom=(figure.median - more) * 1e3, color=colour, hatch=hatch, edgecolor="white"
            )
        _whisker(axes, place, figure.quartiles)
    _stack(axes, len(names), measurement, label=True)
    axes.set_xticks(range(len(names) + 1), [*(_NAMES[name] for name in names), "whole step"])
    axes.set(ylabel="ms a step", title="each alone, and a step as in training")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _draw_several(axes: Axes, found: Sequence[Measurement]) -> None:
    """A stack for each variant."""
    for place, measurement in enumerate(found):
        _stack(axes, place, measurement, label=place == 0)
        shares = find_shares(measurement)
        above = (place, shares.whole.quartiles[1] * 1e3)
        rate = f"{shares.samples_per_second.median:,.0f}/s"
        axes.annotate(rate, above, (0, 4), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(found)), [_folded(each.name or "as it is") for each in found], fontsize=8)
    axes.set(ylabel="ms a step")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _stack(axes: Axes, place: int, measurement: Measurement, label: bool) -> None:
    shares = find_shares(measurement)
    bottom = 0.0
    for name, (colour, hatch) in COLOURS.items():
        height = max(0.0, shares.path[name].median) * 1e3
        title = f"{name}" if label else None
        axes.bar(place, height, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", label=title)
        bottom += height
    _whisker(axes, place, shares.whole.quartiles)


def _whisker(axes: Axes, place: int, quartiles: tuple[float, float]) -> None:
    low, high = (value * 1e3 for value in quartiles)
    axes.plot([place, place], [low, high], color="black", lw=1.2, marker="_", ms=6)


def _draw_ranks(axes: Axes, measurement: Measurement) -> None:
    """What every rank takes alone, so that the slowest is seen."""
    phases = [name for name in ("read", "compute") if name in measurement.seconds]
    width = 0.8 / len(phases)
    for number, name in enumerate(phases):
        medians = [sorted(trials)[len(trials) // 2] * 1e3 for trials in measurement.seconds[name]]
        places = [rank + (number - (len(phases) - 1) / 2) * width for rank in range(measurement.ranks)]
        axes.bar(places, medians, width, color=COLOURS[_ALONE[name]][0], label=f"{name} alone")
    if measurement.ranks <= 16:
        axes.set_xticks(range(measurement.ranks), [str(rank) for rank in range(measurement.ranks)])
    axes.set(xlabel="rank", ylabel="ms a step", title="rank by rank")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _folded(name: str) -> str:
    """A name in lines of about twelve characters."""
    lines = [""]
    for word in name.split():
        if lines[-1] and len(lines[-1]) + len(word) > 12:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
