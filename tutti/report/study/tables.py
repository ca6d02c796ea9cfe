"""The tables of a study: settings, points and conditions; and its points as CSV."""

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tutti import units
from tutti.forecast.kept import FOLDER, CheckedForecast
from tutti.forecast.planning import chance
from tutti.forecast.studies import StudyForecast
from tutti.runs.step_parts import SHARES, StepPart
from tutti.study.analysis import Analysis, Setting
from tutti.study.outcome import RunFigures, Summary
from tutti.study.sweep_results import value_words

_LONG_TEXT = 30


@dataclass(frozen=True)
class Cell:
    """A cell of a table; numbers are aligned to the right."""

    text: str
    is_number: bool = False
    link: str | None = None
    kind: str = ""  # CSS class of a state

    @property
    def css_class(self) -> str:
        """The CSS class of the cell."""
        if self.link:
            return "name"
        return "number" if self.is_number else "words" if len(self.text) > _LONG_TEXT else ""


ShowValue = Callable[[str, Any], Cell]


@dataclass(frozen=True)
class Table:
    """A table of a page."""

    caption: str
    titles: tuple[str, ...]
    rows: list[list[Cell]]

    @property
    def number_columns(self) -> list[bool]:
        """For each column, whether all of its cells are numbers."""
        return [bool(self.rows) and all(row[n].is_number for row in self.rows) for n in range(len(self.titles))]


def settings_table(analysis: Analysis) -> Table:
    """Returns the results of each setting, with their numbers of runs and ranges."""
    return _scaling_table(analysis) if analysis.scaling else _sweep_table(analysis)


def _scaling_table(analysis: Analysis) -> Table:
    assert analysis.scaling is not None
    rows = []
    for point in analysis.scaling.points:
        is_first = point is analysis.scaling.points[0]  # the reference of the others
        share = point.share_estimates.get(StepPart.COMMUNICATION)
        speed = point.speed
        texts = [
            str(point.ranks),
            units.count(point.global_batch) if point.global_batch else "",
            f"{point.runs} ({point.windows})",
            _speeds(speed.value, speed.low, speed.high),
            "1.00" if is_first else f"{point.speedup.value:.2f} ({point.speedup.low:.2f} to {point.speedup.high:.2f})",
            units.percent(1, 1) if is_first else point.efficiency.percent(1),
            units.duration(point.step_seconds) if point.step_seconds else "",
            "" if share is None else share.percent(1) if share.high else units.percent(0, 1),
        ]
        rows.append([Cell(text, is_number=True) for text in texts])
    titles = (
        "ranks",
        "global batch",
        "runs (windows)",
        "samples/s",
        "speed-up",
        "efficiency",
        "step time",
        "exposed communication",
    )
    return Table("By number of ranks: medians over finished runs, with 95% bootstrap intervals.", titles, rows)


def links_table(analysis: Analysis) -> Table | None:
    """Compares exposed communication with an all-reduce over measured links; None without a measurement."""
    if analysis.links is None or not analysis.links.comparisons:
        return None
    rows = []
    for each in analysis.links.comparisons:
        exposed = units.interval(units.duration, each.exposed.value, each.exposed.low, each.exposed.high)
        texts = [str(each.ranks), each.size, exposed, units.duration(each.seconds), each.ratio.percent()]
        rows.append([Cell(text, is_number=True) for text in texts])
    caption = "Exposed communication compared with one all-reduce of the gradients over the measured links."
    titles = ("ranks", "gradients", "exposed per step", "all-reduce by the links", "exposed / all-reduce")
    return Table(caption, titles, rows)


def forecast_table(forecast: StudyForecast) -> Table | None:
    """Throughput and efficiency on more ranks than were measured; None without a forecast."""
    if forecast.curve is None:
        return None
    curve = forecast.curve
    rows = []
    for each in forecast.made:
        ends = [curve.efficiency(each.ranks, end) for end in each.interval90]
        texts = [
            units.count(each.ranks),
            units.count(each.nodes),
            _speeds(each.samples_per_second, *each.interval90),
            units.interval(units.percent, each.efficiency, *ends),
            "" if each.above is None else chance(each.above),
            f"x{each.extrapolation:.3g}",
        ]
        rows.append([Cell(text, is_number=True) for text in texts])
    caption = f"On more ranks than were measured, with 90% intervals for a new run, {forecast.made[0].basis}."
    return Table(
        caption,
        (
            "ranks",
            "nodes",
            "samples/s",
            "efficiency",
            f"chance of {units.percent(forecast.threshold)}",
            "extrapolation",
        ),
        rows,
    )


def kept_link(places: Mapping[str, Path], digest: str, page: Path) -> str | None:
    """The link to a kept forecast; `places` are the folders that keep them, by digest."""
    place = places.get(digest)
    return link_to(place / FOLDER / f"{digest[:12]}.json", page) if place else None


def checks_table(checked: Sequence[CheckedForecast], places: Mapping[str, Path], page: Path) -> Table | None:
    """Earlier forecasts beside what was measured, with links to both; None without any."""
    if not checked:
        return None
    rows = [
        [
            Cell(f"{each.created[:10]}{', after the run' if each.is_ahead is False else ''}"),
            Cell(each.digest[:12], link=kept_link(places, each.digest, page)),
            Cell(units.count(each.ranks), is_number=True),
            Cell(units.count(each.nodes), is_number=True),
            Cell(_speeds(each.forecast, *each.interval90), is_number=True),
            Cell(
                _speed(each.measured),
                is_number=True,
                link=link_to(Path(each.measured_in), page) if each.measured_in else None,
            ),
            Cell(f"{each.error:+.1%}", is_number=True),
            Cell("yes" if each.is_inside(each.interval68) else "no"),
            Cell("yes" if each.is_inside(each.interval90) else "no"),
            Cell(each.basis),
        ]
        for each in checked
    ]
    titles = ("made", "digest", "ranks", "nodes", "forecast (90% interval)", "measured", "error")
    caption = "Forecasts of runs that were not part of their input, in samples/s."
    return Table(caption, (*titles, "inside 68%", "inside 90%", "basis"), rows)


def _sweep_table(analysis: Analysis) -> Table:
    keys, metric = analysis.varied or ["ranks"], analysis.metric
    titles = (*keys, "runs ended", "collapsed", "samples/s")
    if metric:
        titles += (f"final {units.metric_title(metric)}", f"best {units.metric_title(metric)}")
    titles += ("steps to goal", "time to goal")
    caption = "By setting, over runs: mean (minimum to maximum); steps and times are medians."
    show = _value_cells(analysis)
    return _without_empty(Table(caption, titles, [_sweep_row(each, keys, metric, show) for each in analysis.settings]))


def _sweep_row(setting: Setting, keys: list[str], metric: str | None, show: ShowValue) -> list[Cell]:
    speed, steps, seconds = setting.speed, setting.steps_to_goal(), setting.seconds_to_goal()
    texts = [f"{len(setting.ended)} of {len(setting.runs)}", str(len(setting.collapsed) or "")]
    texts.append(_speeds(speed.median, speed.low, speed.high) if speed else "")
    if metric:
        texts += [_range(metric, found) if found else "" for found in (setting.final(metric), setting.best(metric))]
    ended = len(setting.ended)
    texts.append(f"{units.count(round(steps.median))}{_of_some(steps.n, ended)}" if steps else "")
    texts.append(f"{units.duration(seconds.median)}{_of_some(seconds.n, ended)}" if seconds else "")
    cells = [show(key, setting.values.get(key, setting.ranks if key == "ranks" else "")) for key in keys]
    return cells + [Cell(text, is_number=True) for text in texts]


def _range(metric: str, found: Summary) -> str:
    """The mean with minimum and maximum over runs."""
    if found.n == 1:
        return units.metric(metric, found.mean)
    return units.interval(lambda value: units.metric(metric, value), found.mean, found.low, found.high)


def _of_some(n: int, ended: int) -> str:
    """The number of runs of a value, if not all."""
    return "" if n == ended else f" ({n} of {ended})"


def points_table(analysis: Analysis, page: Path) -> Table:
    """Returns every point with its state and results, linked to its run folder."""
    keys, metric = [key for key in analysis.varied if key != "ranks"], analysis.metric
    titles = ("point", "state", "ranks", *keys, "seed", "samples/s", "windows", "range", "communication")
    if metric:
        titles += (f"final {units.metric_title(metric)}", f"best {units.metric_title(metric)}")
    titles += ("time to goal", "remarks")
    show = _value_cells(analysis)
    rows = [_point_row(run, keys, metric, page, show) for run in analysis.runs]
    return _without_empty(Table("All points, including those that failed or have not run.", titles, rows))


def _point_row(run: RunFigures, keys: list[str], metric: str | None, page: Path, show: ShowValue) -> list[Cell]:
    point, state, speed = run.outcome.point, run.outcome.state, run.speed
    cells = [
        Cell(run.id, link=link_to(Path(run.outcome.folder), page)),
        Cell(state.state, kind=state.state),
        Cell(str(point.ranks), True),
    ]
    cells += [show(key, point.values.get(key, "")) for key in keys]
    texts = [
        str(point.seed),
        _speed(speed.median) if speed else "",
        str(speed.n) if speed else "",
        f"{_speed(speed.low)} to {_speed(speed.high)}" if speed else "",
        units.percent(run.shares[StepPart.COMMUNICATION], 1) if run.shares else "",
    ]
    if metric:
        texts += [units.metric(metric, each[metric]) if metric in each else "" for each in (run.final, run.best)]
    texts.append(units.duration(run.reached.seconds) if run.reached else "")
    return [*cells, *(Cell(text, True) for text in texts), Cell("; ".join(_remarks(run)))]


def _remarks(run: RunFigures) -> list[str]:
    found = [run.outcome.state.reason] if run.outcome.state.reason else []
    if run.collapse:
        found.append(f"collapsed: {run.collapse}")
    if run.is_outlier:
        found.append("an outlier among its repeats")
    if run.outlier_windows:
        steps = ", ".join(f"{step:,}" for step in run.outlier_windows[:5])
        more = ", ..." if len(run.outlier_windows) > 5 else ""
        found.append(f"outlier windows ending at step {steps}{more}")
    if run.outcome.state.attempts > 1:
        found.append(f"{run.outcome.state.attempts} attempts")
    return found


def _without_empty(table: Table) -> Table:
    """Removes columns without any text."""
    kept = [place for place in range(len(table.titles)) if any(row[place].text for row in table.rows)]
    return Table(table.caption, tuple(table.titles[p] for p in kept), [[row[p] for p in kept] for row in table.rows])


def link_to(target: Path, page: Path) -> str | None:
    """The link from the page to a file or a folder; None if it does not exist."""
    if not target.exists():
        return None
    return quote(os.path.relpath(target.resolve(), page.parent.resolve())) + ("/" if target.is_dir() else "")


def _value_cells(analysis: Analysis) -> ShowValue:
    """Returns the function that shows a value of a key, given all values of that key."""

    def show(key: str, value: Any) -> Cell:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        among = [setting.values.get(key) for setting in analysis.settings]
        return Cell(units.count(value) if is_number and abs(value) >= 1 else value_words(value, among), is_number)

    return show


def conditions_table(analysis: Analysis) -> Table:
    """Returns the conditions of the runs: every value that occurred."""
    found: dict[str, dict[str, None]] = {}
    for run in analysis.runs:
        for name, value in _conditions(run.outcome.conditions):
            found.setdefault(name, {})[value] = None
    seeds = sorted({run.outcome.point.seed for run in analysis.runs})
    found["seed"] = {str(seed): None for seed in seeds}
    rows = [[Cell(name), Cell("; ".join(values))] for name, values in found.items()]
    return Table("Recorded by the runs; several values if points differ.", ("condition", "value"), rows)


_NOT_CONDITIONS = ("started", "ended", "process", "state", "ranks", "launch_line", "resumed_from", "cores", "host")


def _conditions(segment: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key, value in segment.items():
        if key in _NOT_CONDITIONS or value is None:
            continue
        if isinstance(value, Mapping):
            found += [(f"{key}: {name}".replace("_", " "), str(each)) for name, each in value.items()]
        elif isinstance(value, list):
            found.append((key.replace("_", " "), ", ".join(dict.fromkeys(map(str, value)))))
        else:
            found.append((key.replace("_", " "), str(value)))
    return found


def _speeds(middle: float, low: float, high: float) -> str:
    return units.interval(_speed, middle, low, high)


def _speed(samples_per_second: float) -> str:
    return units.number(samples_per_second, keep_zeros=True)


def points_csv(analysis: Analysis) -> str:
    """Returns every point as a line of CSV with plain numbers."""
    metrics = list(dict.fromkeys(name for run in analysis.runs for name in run.final))
    keys = list(dict.fromkeys(key for run in analysis.runs for key in run.outcome.point.values if key != "ranks"))
    titles = ["id", "state", "reason", "ranks", *keys, "repeat", "seed", "global_batch", "per_rank_batch", "windows"]
    titles += ["samples_per_second", "samples_per_second_low", "samples_per_second_high", "outlier", "outlier_windows"]
    titles += [f"{part.share_key}_share" for part in SHARES]
    titles += ["gradient_bytes", "exposed_seconds", "all_reduce_seconds"] if analysis.links else []
    titles += [f"{which}_{name}" for name in metrics for which in ("final", "best")]
    titles += ["goal_epoch", "goal_step", "goal_seconds", "collapse", "folder"]
    text = io.StringIO()
    writer = csv.DictWriter(text, titles, lineterminator="\n")
    writer.writeheader()
    for run in analysis.runs:
        writer.writerow(_csv_row(run, keys, metrics) | _csv_links(analysis, run))
    return text.getvalue()


def _csv_row(run: RunFigures, keys: list[str], metrics: list[str]) -> dict[str, Any]:
    point, state, plan, speed, reached = run.outcome.point, run.outcome.state, run.outcome.plan, run.speed, run.reached
    row: dict[str, Any] = {"id": run.id, "state": state.state, "reason": state.reason, "ranks": point.ranks}
    row |= {key: _plain(point.values.get(key)) for key in keys} | {"repeat": point.repeat, "seed": point.seed}
    row |= {key: plan.get(key) for key in ("global_batch", "per_rank_batch")}
    if speed:
        row |= {"windows": speed.n, "samples_per_second": speed.median}
        row |= {"samples_per_second_low": speed.low, "samples_per_second_high": speed.high}
        row |= {"outlier": run.is_outlier, "outlier_windows": len(run.outlier_windows)}
    row |= {f"{part.share_key}_share": share for part, share in run.shares.items()}
    row |= {f"final_{name}": run.final.get(name) for name in metrics} | {
        f"best_{name}": run.best.get(name) for name in metrics
    }
    if reached:
        row |= {"goal_epoch": reached.epoch, "goal_step": reached.step, "goal_seconds": reached.seconds}
    return row | {"collapse": run.collapse, "folder": run.outcome.folder}


def _csv_links(analysis: Analysis, run: RunFigures) -> dict[str, Any]:
    """The gradient size of a run, its exposed seconds per step, and an all-reduce over measured links."""
    found = analysis.links.at(run.outcome.point.ranks) if analysis.links else None
    if found is None or not run.shares or run.speed is None:
        return {}
    exposed = run.shares[StepPart.COMMUNICATION] * run.outcome.plan["global_batch"] / run.speed.median
    return {
        "gradient_bytes": found.gradient_bytes,
        "exposed_seconds": exposed,
        "all_reduce_seconds": found.seconds,
    }


def _plain(value: Any) -> Any:
    """Returns mappings and lists as JSON, other values unchanged."""
    return json.dumps(value) if isinstance(value, Mapping | list) else value
