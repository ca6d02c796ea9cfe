"""Charts drawn by matplotlib, as PNG and SVG."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from tutti import units
from tutti.report.study.charts import BAND_OPACITY, Chart, ChartAxis, Curve, colour_of
from tutti.report.style import MARKS, STROKES, plt
from tutti.runs.step_parts import StepPart

_SHORT_LEGEND = 5  # entries of a legend inside the axes
_HATCHES: dict[str, str] = {StepPart.COMMUNICATION: "//", StepPart.STRAGGLER: "\\\\"}


def draw_charts(charts: list[Chart], folder: Path) -> list[Path]:
    """Draws every chart; one with a second x axis or an enlarged view gives two pictures."""
    folder.mkdir(exist_ok=True)
    paths = []
    for chart in charts:
        paths += _draw(chart, chart.x, folder / chart.id, is_other=False)
        if chart.other_axis:
            paths += _draw(chart, chart.other_axis, folder / f"{chart.id}_{chart.switch[1].split()[-1]}", is_other=True)
        if chart.close_up:
            y = replace(chart.y, least=chart.close_up[0], most=chart.close_up[1])
            paths += _draw(replace(chart, y=y), chart.x, folder / f"{chart.id}_close", is_other=False)
    return paths


def _draw(chart: Chart, x: ChartAxis, path: Path, is_other: bool) -> list[Path]:
    panels = chart.panels
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = math.ceil(len(panels) / columns)
    bars = len(chart.curves[0].x) if chart.kind == "bars" else 0
    size = (max(6.4, 1.15 * bars), 4.2) if columns == 1 else (1.4 + 3.2 * columns, 0.9 + 2.5 * rows)
    figure, grid = plt.subplots(
        rows, columns, figsize=size, layout="constrained", sharex=columns > 1, sharey=columns > 1, squeeze=False
    )
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.remove()
            continue
        curves = [curve for curve in chart.curves if curve.panel == panels[place]]
        _draw_panel(axes, chart, curves, is_other)
        _format_axes(axes, chart, x)
        if columns > 1:
            _format_panel(axes, panels[place], place % columns == 0, place + columns >= len(panels))
    figure.suptitle(chart.title)
    _add_legend(figure, grid.flat[0], chart)
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for each in paths:
        figure.savefig(each, dpi=150)
    plt.close(figure)
    return paths


def _draw_panel(axes: Axes, chart: Chart, curves: list[Curve], is_other: bool) -> None:
    bottom = [0.0] * len(chart.curves[0].x)
    for curve in curves:
        if chart.kind == "bars":
            heights = [value or 0.0 for value in curve.y]
            axes.bar(
                [str(each).replace(", ", "\n") for each in curve.x],
                heights,
                bottom=bottom,
                color=colour_of(curve.colour),
                hatch=_HATCHES.get(curve.name, ""),
                edgecolor="white",
                label=curve.name,
            )
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        else:
            _plot(axes, curve, is_other)


def _format_panel(axes: Axes, title: str, is_left: bool, is_lowest: bool) -> None:
    """Sets the title of a panel; only outer panels have axis titles."""
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8, labelbottom=is_lowest)
    if not is_left:
        axes.set_ylabel("")
    if not is_lowest:
        axes.set_xlabel("")


def _add_legend(figure: Figure, axes: Axes, chart: Chart) -> None:
    """Draws a short legend inside the axes, a long one below them."""
    found: dict[str, Any] = {}
    for each in figure.axes:
        found = dict(zip(*reversed(each.get_legend_handles_labels()), strict=True)) | found
    handles = {curve.name: found[curve.name] for curve in chart.curves if curve.name in found}
    if len(handles) < 2:
        return
    if len(chart.panels) == 1 and len(handles) <= _SHORT_LEGEND and chart.kind != "bars":
        axes.legend(handles.values(), handles.keys(), fontsize=8)
        return
    columns = max(1, int(12 * figure.get_figwidth() / max(map(len, handles)) / 1.2))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, len(handles)), fontsize=8
    )


def _plot(axes: Axes, curve: Curve, is_other: bool) -> None:
    colour = colour_of(curve.colour)
    x = list(curve.other_x or ()) if is_other else list(curve.x)
    y = [float("nan") if value is None else value for value in curve.y]
    mark = ("x" if curve.crossed else MARKS[curve.style % len(MARKS)]) if curve.marks else ""
    line = STROKES[curve.style % len(STROKES)] if curve.line else ""
    label = curve.name if curve.in_legend else None
    if curve.band:
        low, high = ([value or 0.0 for value in ends or ()] for ends in (curve.low, curve.high))
        axes.fill_between(x, low, high, color=colour, alpha=BAND_OPACITY, lw=0, label=label)
        return
    size, alpha = (3, 0.5) if curve.faint else (10 if curve.crossed else 6, 1.0)
    if curve.low is not None and curve.high is not None:
        below = [max(0.0, value - (low or 0.0)) for low, value in zip(curve.low, y, strict=True)]
        above = [max(0.0, (high or 0.0) - value) for high, value in zip(curve.high, y, strict=True)]
        axes.errorbar(
            x, y, [below, above], color=colour, marker=mark, ms=size, ls=line or "none", lw=1.5, capsize=3, label=label
        )
    else:
        width = 1.5 if curve.marks else 1.0
        axes.plot(
            x,
            y,
            color=colour,
            marker=mark,
            ms=size,
            ls=line or "none",
            lw=width,
            alpha=alpha,
            label=label,
            mew=2 if curve.crossed else 1,
            mfc="white" if curve.hollow else None,
        )


def _format_axes(axes: Axes, chart: Chart, x: ChartAxis) -> None:
    """Sets scales, ticks, titles and the grid."""
    y = chart.y
    axes.set(xlabel=x.title, ylabel=y.title)
    if x.log:
        axes.set_xscale("log")
    if y.log:
        axes.set_yscale("log")
    if x.ticks and chart.kind != "bars":
        axes.set_xticks(x.ticks, [units.count(tick) for tick in x.ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    if y.log and y.ticks:
        axes.set_yticks(y.ticks, [units.count(tick) for tick in y.ticks])
        axes.yaxis.set_minor_locator(NullLocator())
    if y.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if y.least is not None:
        axes.set_ylim(y.least, y.most)
    axes.grid(alpha=0.3, axis="y" if chart.kind == "bars" else "both")
    axes.set_axisbelow(True)
