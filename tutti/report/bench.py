"""Pictures of measurements: bench.png, tune.png and collectives.png."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from tutti import units
from tutti.bench.collectives.model import BUS_FACTORS, fit_line
from tutti.bench.collectives.results import OPERATIONS, PICTURE, Measured, Results, as_points, read_results
from tutti.bench.greedy_search import TriedChange
from tutti.bench.results import Measurement
from tutti.bench.shares import find_shares
from tutti.report.style import BLUE, COLOURS, GREEN, LIGHT_GREY, MARKS, ORANGE, VERMILION, plt
from tutti.runs.step_parts import StepPart

_PART_STYLES = {  # colour and hatch
    StepPart.DATA: (ORANGE, ""),
    StepPart.COMPUTE: (BLUE, ""),
    StepPart.COMMUNICATION: (GREEN, "//"),
    StepPart.STRAGGLER: (VERMILION, "\\\\"),
    StepPart.OTHER: (LIGHT_GREY, ""),
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
    """Draws the phases and ranks of one measurement, or several measurements side by side."""
    if len(found) == 1:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained", width_ratios=(3, 2))
        _draw_one(left, found[0])
        _draw_ranks(right, found[0])
    else:
        figure, axes = plt.subplots(figsize=(max(6.0, 1.3 * len(found) + 2), 4), layout="constrained")
        _draw_several(axes, found)
    first = found[0]
    recipe = first.settings.get("recipe", "")
    title = f"{recipe}: {units.count(first.ranks, 'rank')} on {first.device_name}, {first.trials} trials"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_one(axes: Axes, measurement: Measurement) -> None:
    """Draws each phase measured alone, then the whole step in its parts."""
    shares = find_shares(measurement)
    names = [name for name in _NAMES if name in shares.alone]
    for place, name in enumerate(names):
        figure = shares.alone[name]
        colour, hatch = _PART_STYLES[_ALONE.get(name, StepPart.COMPUTE)]
        axes.bar(place, figure.median * 1e3, color=colour, hatch=hatch, alpha=0.55, edgecolor="white")
        if name == "communicate":
            more = figure.median - shares.alone["compute"].median
            colour, hatch = _PART_STYLES[StepPart.COMMUNICATION]
            axes.bar(
                place, more * 1e3, bottom=(figure.median - more) * 1e3, color=colour, hatch=hatch, edgecolor="white"
            )
        _whisker(axes, place, figure.quartiles)
    _stack(axes, len(names), measurement, label=True)
    axes.set_xticks(range(len(names) + 1), [*(_NAMES[name] for name in names), "whole step"])
    axes.set(ylabel="ms per step", title="phases alone, and a whole step")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _draw_several(axes: Axes, found: Sequence[Measurement]) -> None:
    """Draws a stacked bar for each variant."""
    for place, measurement in enumerate(found):
        _stack(axes, place, measurement, label=place == 0)
        shares = find_shares(measurement)
        above = (place, shares.whole.quartiles[1] * 1e3)
        rate = f"{shares.samples_per_second.median:,.0f}/s"
        axes.annotate(rate, above, (0, 4), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(found)), [_wrapped(each.name or "unchanged") for each in found], fontsize=8)
    axes.set(ylabel="ms per step")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _stack(axes: Axes, place: int, measurement: Measurement, label: bool) -> None:
    shares = find_shares(measurement)
    bottom = 0.0
    for name, (colour, hatch) in _PART_STYLES.items():
        height = max(0.0, shares.path[name].median) * 1e3
        title = f"{name}" if label else None
        axes.bar(place, height, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", label=title)
        bottom += height
    _whisker(axes, place, shares.whole.quartiles)


def _whisker(axes: Axes, place: int, quartiles: tuple[float, float]) -> None:
    low, high = (value * 1e3 for value in quartiles)
    axes.plot([place, place], [low, high], color="black", lw=1.2, marker="_", ms=6)


def _draw_ranks(axes: Axes, measurement: Measurement) -> None:
    """Draws the phases of every rank, to show the slowest."""
    phases = [name for name in ("read", "compute") if name in measurement.seconds]
    width = 0.8 / len(phases)
    for number, name in enumerate(phases):
        medians = [sorted(trials)[len(trials) // 2] * 1e3 for trials in measurement.seconds[name]]
        places = [rank + (number - (len(phases) - 1) / 2) * width for rank in range(measurement.ranks)]
        axes.bar(places, medians, width, color=_PART_STYLES[_ALONE[name]][0], label=f"{name} alone")
    if measurement.ranks <= 16:
        axes.set_xticks(range(measurement.ranks), [str(rank) for rank in range(measurement.ranks)])
    axes.set(xlabel="rank", ylabel="ms per step", title="by rank")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _wrapped(name: str) -> str:
    """A name in lines of about twelve characters."""
    lines = [""]
    for word in name.split():
        if lines[-1] and len(lines[-1]) + len(word) > 12:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def draw_tuning(changes: Sequence[TriedChange], recipe: str, path: Path) -> Path:
    """A bar for each change, in the order of trial, with the interquartile range; changes that failed have none."""
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(changes) + 1.4), layout="constrained")
    most = max((change.after.quartiles[1] for change in changes if change.after), default=1.0) or 1.0
    for place, change in enumerate(changes):
        speed = change.after.median if change.after else 0.0
        axes.barh(place, speed, color=BLUE if change.kept else LIGHT_GREY, hatch="" if change.kept else "//")
        low, high = change.after.quartiles if change.after else (0.0, 0.0)
        if change.after:
            axes.plot([low, high], [place, place], color="black", lw=1.2, marker="|", ms=6)
        words = [
            f"{change.gain:.2f} x" if change.gain else "",
            change.outcome if len(change.outcome) < 40 else "failed",
        ]
        axes.annotate("  " + "  ".join(filter(None, words)), (max(speed, high), place), va="center", fontsize=8)
    axes.set_yticks(range(len(changes)), [change.name for change in changes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * most)
    axes.set(xlabel="samples/s of all ranks", title=f"{recipe}: each change in addition to those kept")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


Scale = Callable[[float, float], float]  # from bytes and seconds to the plotted value


def draw_collectives(folder: Path) -> Path:
    """Draws `collectives.json` of a folder into the same folder."""
    results = read_results(folder)
    operations = [each for each in OPERATIONS if any(point.operation == each for point in results.points)]
    width = 4.6 * max(len(operations), 2)
    figure, axes = plt.subplots(
        2, len(operations), figsize=(width, 7), sharex=True, squeeze=False, layout="constrained"
    )
    for column, operation in enumerate(operations):
        _draw_operation(axes[0][column], axes[1][column], results, operation)
    for row, title in enumerate(("time of a call in ms", "bus bandwidth in GB/s")):
        axes[row][0].set_ylabel(title)
        _share_limits(axes[row])
    conditions = results.conditions
    hosts = len(set(conditions["hosts"]))
    figure.suptitle(
        f"collectives over {conditions['backend']}, {conditions['ranks']} ranks on {units.count(hosts, 'host')}, "
        f"median and range of {conditions['trials']} trials, lines: fits",
        fontsize=11,
    )
    figure.savefig(folder / PICTURE, dpi=110)
    plt.close(figure)
    return folder / PICTURE


def _draw_operation(times: Axes, rates: Axes, results: Results, operation: str) -> None:
    """Draws time above and bus bandwidth below, with a colour for each number of ranks."""
    mine = [point for point in results.points if point.operation == operation]
    for number, ranks in enumerate(sorted({point.ranks for point in mine})):
        points = [point for point in mine if point.ranks == ranks]
        factor = BUS_FACTORS[operation](ranks)
        style = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        _draw_series(times, points, lambda size, seconds: 1e3 * seconds, style)
        _draw_series(rates, points, lambda size, seconds, factor=factor: factor * size / seconds / 1e9, style)
    times.set_title(operation)
    times.legend(fontsize=8)
    rates.set_xlabel("size of a message")
    sizes = sorted({point.bytes for point in mine})[:: 1 if len({p.bytes for p in mine}) < 7 else 2]
    for axes in (times, rates):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(sizes, [units.size(size) for size in sizes], fontsize=8, rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.3)


def _draw_series(axes: Axes, points: list[Measured], scale: Scale, style: tuple[str, str]) -> None:
    """Draws medians with the range over trials, and the fitted line."""
    colour, mark = style
    sizes = [point.bytes for point in points]
    middle = np.array([scale(point.bytes, point.seconds) for point in points])
    ends = [[scale(p.bytes, end(p.trials_seconds)) for p in points] for end in (min, max)]
    below, above = middle - np.min(ends, axis=0), np.max(ends, axis=0) - middle
    label = f"{points[0].ranks} ranks, {units.count(points[0].hosts, 'host')}"
    axes.errorbar(sizes, middle, [below, above], fmt=mark, ms=5, capsize=2, color=colour, label=label)
    if line := fit_line(as_points(points)):
        along = np.geomspace(min(sizes), max(sizes), 100)
        axes.plot(along, [scale(size, line.seconds(size)) for size in along], "-", lw=1, color=colour, alpha=0.8)


def _share_limits(row: np.ndarray) -> None:
    """Sets the same limits for all operations, so that they can be compared."""
    limits = np.array([axes.get_ylim() for axes in row])
    for axes in row:
        axes.set_ylim(limits[:, 0].min(), limits[:, 1].max())
