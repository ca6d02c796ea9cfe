"""collectives.png: time and bus bandwidth of collectives over sizes of messages, with the fitted lines."""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from tutti.bench.collectives.model import BUS_FACTORS, fit_line
from tutti.bench.collectives.results import OPERATIONS, PICTURE, Measured, Results, as_points, read_results, show_size

# Okabe and Ito's colours, told apart by all eyes, each with a mark of its own.
_STYLES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P")]

Scale = Callable[[float, float], float]  # from bytes and seconds to what is drawn


def draw_collectives(folder: Path) -> Path:
    """Draw what is in a folder's `collectives.json`, beside it."""
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
        f"collectives over {conditions['backend']}, {conditions['ranks']} ranks on {hosts} host(s), "
        f"median and range of {conditions['trials']} trials, lines: fits",
        fontsize=11,
    )
    figure.savefig(folder / PICTURE, dpi=110)
    plt.close(figure)
    return folder / PICTURE


def _draw_operation(times: Axes, rates: Axes, results: Results, operation: str) -> None:
    """Time above, bus bandwidth below; a colour for each number of ranks."""
    mine = [point for point in results.points if point.operation == operation]
    for number, ranks in enumerate(sorted({point.ranks for point in mine})):
        points = [point for point in mine if point.ranks == ranks]
        factor = BUS_FACTORS[operation](ranks)
        style = _STYLES[number % len(_STYLES)]
        _draw_series(times, points, lambda size, seconds: 1e3 * seconds, style)
        _draw_series(rates, points, lambda size, seconds, factor=factor: factor * size / seconds / 1e9, style)
    times.set_title(operation)
    times.legend(fontsize=8)
    rates.set_xlabel("size of a message")
    sizes = sorted({point.bytes for point in mine})[:: 1 if len({p.bytes for p in mine}) < 7 else 2]
    for axes in (times, rates):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(sizes, [show_size(size) for size in sizes], fontsize=8, rotation=30)
        axes.minorticks_off()
        axes.grid(alpha=0.3)


def _draw_series(axes: Axes, points: list[Measured], scale: Scale, style: tuple[str, str]) -> None:
    """Medians with the range over trials, and the fitted line."""
    colour, mark = style
    sizes = [point.bytes for point in points]
    middle = np.array([scale(point.bytes, point.seconds) for point in points])
    ends = [[scale(p.bytes, end(p.trials_seconds)) for p in points] for end in (min, max)]
    below, above = middle - np.min(ends, axis=0), np.max(ends, axis=0) - middle
    label = f"{points[0].ranks} ranks, {points[0].hosts} host(s)"
    axes.errorbar(sizes, middle, [below, above], fmt=mark, ms=5, capsize=2, color=colour, label=label)
    if line := fit_line(as_points(points)):
        along = np.geomspace(min(sizes), max(sizes), 100)
        axes.plot(along, [scale(size, line.seconds(size)) for size in along], "-", lw=1, color=colour, alpha=0.8)


def _share_limits(row: np.ndarray) -> None:
    """The same scale for all operations, so that they can be compared."""
    limits = np.array([axes.get_ylim() for axes in row])
    for axes in row:
        axes.set_ylim(limits[:, 0].min(), limits[:, 1].max())
