"""Charts as data and layout for plotly.js."""

import json
from typing import Any

import plotly.graph_objects as go

from tutti import units
from tutti.report.study.charts import BAND_OPACITY, Chart, ChartAxis, Curve, colour_of
from tutti.runs.step_parts import StepPart

_MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "star")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_HATCHES: dict[str, str] = {StepPart.COMMUNICATION: "/", StepPart.STRAGGLER: "\\"}


def figure_of(chart: Chart) -> dict[str, Any]:
    """Returns plotly's data and layout of a chart, its panel titles, and the values of the page's buttons."""
    panels = chart.panels
    traces = [_bars(curve) if chart.kind == "bars" else _trace(curve) for curve in chart.curves]
    for trace, curve in zip(traces, chart.curves, strict=True):
        number = _axis_number(panels.index(curve.panel))
        trace.update(xaxis=f"x{number}", yaxis=f"y{number}")
    figure = go.Figure(traces)
    figure.update_layout(
        template="none",
        barmode="stack",
        hovermode="closest",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 64, "r": 36, "t": 12, "b": 48},
        font={"family": "inherit", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "xanchor": "left", "traceorder": "normal"},
        modebar={"orientation": "v"},
        **_axes(chart, len(panels)),
    )
    found: dict[str, Any] = {"id": chart.id, "panels": panels} | json.loads(figure.to_json() or "{}")
    found["layout"].pop("template", None)
    if chart.other_axis:
        found["x_axes"] = [
            {"title": chart.x.title, "x": [list(curve.x) for curve in chart.curves]},
            {"title": chart.other_axis.title, "x": [list(curve.other_x or ()) for curve in chart.curves]},
        ]
    if chart.close_up:
        found["close_up"] = list(chart.close_up)
    return found


def _axis_number(panel: int) -> str:
    """The number of an axis in plotly: the first has none."""
    return "" if panel == 0 else str(panel + 1)


def _axes(chart: Chart, panels: int) -> dict[str, Any]:
    """Returns linked axes for every panel; page.js sets their positions."""
    x = _axis(chart.x) | ({"type": "category"} if chart.kind == "bars" else {})
    y = _axis(chart.y)
    found = {}
    for panel in range(panels):
        number = _axis_number(panel)
        found[f"xaxis{number}"] = x | {"anchor": f"y{number}"} | ({"matches": "x"} if panel else {})
        found[f"yaxis{number}"] = y | {"anchor": f"x{number}"} | ({"matches": "y"} if panel else {})
    return found


def _trace(curve: Curve) -> go.Scatter:
    colour = colour_of(curve.colour)
    mode = "+".join(part for part, is_on in (("lines", curve.line), ("markers", curve.marks)) if is_on)
    symbol = "x" if curve.crossed else _MARKS[curve.style % len(_MARKS)]
    heading = f"{curve.heading}<br>" if curve.heading else ""
    if curve.band:
        return _band(curve)
    return go.Scatter(
        name=curve.name,
        x=list(curve.x),
        y=list(curve.y),
        text=list(curve.texts) or None,
        hovertemplate=f"{heading}%{{text}}<extra></extra>" if curve.texts else None,
        hoverinfo=None if curve.texts else "skip",
        mode=mode,
        line={"color": colour, "dash": _DASHES[curve.style % len(_DASHES)], "width": 2 if curve.marks else 1.5},
        marker={
            "color": colour,
            "line": {"color": "white", "width": 1 if curve.crossed else 0},
            "symbol": f"{symbol}-open" if curve.hollow else symbol,
            "size": 5 if curve.faint else 12 if curve.crossed else 9,
            "opacity": 0.6 if curve.faint else 1,
        },
        error_y=_intervals(curve),
        legendgroup=curve.group or None,
        showlegend=curve.in_legend,
    )


def _band(curve: Curve) -> go.Scatter:
    """The area between low and high."""
    low, high = list(curve.low or ()), list(curve.high or ())
    return go.Scatter(
        name=curve.name,
        x=[*curve.x, *reversed(list(curve.x))],
        y=[*high, *reversed(low)],
        mode="lines",
        line={"color": colour_of(curve.colour), "width": 0},
        marker={"color": colour_of(curve.colour)},
        fill="toself",
        opacity=2 * BAND_OPACITY,  # plotly fills with half of the colour
        hoverinfo="skip",
        showlegend=curve.in_legend,
    )


def _bars(curve: Curve) -> go.Bar:
    return go.Bar(
        name=curve.name,
        x=[str(place).replace(", ", "<br>") for place in curve.x],
        y=list(curve.y),
        text=None,
        hovertext=list(curve.texts),
        hovertemplate="%{hovertext}<extra></extra>",
        marker={"color": colour_of(curve.colour), "pattern": _pattern(curve)},
    )


def _pattern(curve: Curve) -> dict[str, Any]:
    shape = _HATCHES.get(curve.name, "")
    return {"shape": shape, "fillmode": "overlay", "solidity": 0.2, "fgcolor": "white", "fgopacity": 0.7}


def _intervals(curve: Curve) -> dict[str, Any] | None:
    if curve.low is None or curve.high is None:
        return None
    middle = [value or 0.0 for value in curve.y]
    above = [(high or 0.0) - value for high, value in zip(curve.high, middle, strict=True)]
    below = [value - (low or 0.0) for low, value in zip(curve.low, middle, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.5, "width": 5}


def _axis(axis: ChartAxis) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": axis.title}, "automargin": True, "showline": True, "zeroline": False}
    if axis.log:
        found["type"] = "log"
    if axis.ticks:
        words = [units.count(tick) for tick in axis.ticks]
        found |= {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": words}
    if axis.percent:
        found["tickformat"] = ".3~%"
    if axis.least is not None:
        found |= {"range": [axis.least, axis.most]} if axis.most is not None else {"rangemode": "tozero"}
    if axis.log:
        found["minor"] = {"ticks": ""}
    return found
