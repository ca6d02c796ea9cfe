"""The page of all forecasts of a project: each beside what was measured later, with a picture and the record."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from tutti import units
from tutti.errors import FolderError
from tutti.forecast.forecast import Forecast
from tutti.forecast.kept import CheckedForecast, KeptForecast, describe_record
from tutti.report.study.page import page_template
from tutti.report.study.tables import Cell, Table, checks_table, kept_link
from tutti.report.style import BLUE, GREY, VERMILION, plt
from tutti.runs.files import write_durably

FILE = "forecasts.html"
_HERE = Path(__file__).parent
_RULE = (
    "Every forecast was kept when it was made, with a digest of its measurements, options and population table. A run "
    "that was part of a forecast's input checks nothing, and a forecast that was made after its run had begun is "
    "shown but not counted. Error is forecast / measured - 1: positive is optimistic."
)


def write_checks(
    folder: Path,
    checked: Sequence[CheckedForecast],
    still_open: Sequence[tuple[KeptForecast, Forecast]],
    places: Mapping[str, Path],
) -> Path:
    """Write the page into a folder; `places` are the folders that keep the forecasts, by digest."""
    page = folder / FILE
    text = page_template("forecasts.html", _HERE).render(
        folder=str(folder),
        record=describe_record(checked),
        picture=Markup(draw_checks(checked)) if checked else "",
        checked=checks_table(checked, places, page),
        still_open=_open_table(still_open, places, page),
        rule=_RULE,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(page, text)
    except OSError as error:
        raise FolderError(f"{page}: cannot be written: {error.strerror}. Choose another place with --out.") from error
    return page


def draw_checks(checked: Sequence[CheckedForecast]) -> str:
    """What was measured, relative to the forecast and its intervals, as SVG."""
    height = 1.1 + 0.34 * len(checked)
    figure, axes = plt.subplots(figsize=(7.6, height), layout="constrained")
    for place, each in enumerate(checked):
        for interval, width in ((each.interval90, 2.0), (each.interval68, 6.0)):
            ends = [end / each.forecast - 1 for end in interval]
            axes.plot(ends, [place, place], color=GREY, lw=width, solid_capstyle="butt")
        colour = BLUE if each.is_inside(each.interval90) else VERMILION
        axes.plot([each.measured / each.forecast - 1], [place], color=colour, marker="o", ms=7)
    names = [f"{each.created[:10]}, {each.digest[:6]}, {units.count(each.ranks, 'rank')}" for each in checked]
    axes.set_yticks(range(len(checked)), names)
    axes.set(xlabel="measured against the forecast", ylim=(len(checked) - 0.4, -0.6))
    axes.axvline(0, color=GREY, ls=":")
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+g}%")
    axes.grid(alpha=0.3, axis="x")
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def _open_table(
    still_open: Sequence[tuple[KeptForecast, Forecast]], places: Mapping[str, Path], page: Path
) -> Table | None:
    if not still_open:
        return None
    rows = [
        [
            Cell(kept.created[:10]),
            Cell(kept.digest[:12], link=kept_link(places, kept.digest, page)),
            Cell(units.count(made.ranks), is_number=True),
            Cell(units.count(made.nodes), is_number=True),
            Cell(units.interval(units.number, made.samples_per_second, *made.interval90), is_number=True),
            Cell(made.basis),
            Cell(kept.workload or "a table"),
        ]
        for kept, made in still_open
    ]
    titles = ("made", "digest", "ranks", "nodes", "forecast (90% interval)", "basis", "workload")
    return Table("Forecasts of which no run exists yet, in samples/s.", titles, rows)
