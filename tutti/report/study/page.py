"""The HTML page of a study: one self-contained file that opens without a network."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from tutti import units
from tutti.report.study.charts import Chart, Study
from tutti.report.study.plotly import figure_of
from tutti.report.study.tables import (
    Cell,
    Table,
    checks_table,
    conditions_table,
    forecast_table,
    links_table,
    points_table,
    settings_table,
)
from tutti.report.style import ON_BLACK
from tutti.runs.record import versions
from tutti.study.analysis import Analysis
from tutti.study.definition import Definition

_HERE = Path(__file__).parent
_RULE = (
    "These sentences follow from the numbers below by fixed rules. Intervals contain 95% of 1,000 bootstrap draws "
    "over runs and the log windows within them; with one run per setting they do not include the variation between "
    "runs. A run has collapsed if its loss is not finite or ends above its start, or if the odds of its final accuracy "
    "are at most 1.5 times those of guessing. Outliers differ from the median by more than 3.5 scaled median absolute "
    "deviations and by more than 1% (windows) or 5% (runs); they are marked and included."
)


@dataclass(frozen=True)
class StudySection:
    """The tables of one study on the page."""

    name: str
    settings: Table
    links: Table | None
    forecast: Table | None
    forecast_notes: list[str]
    checks: Table | None
    check_notes: list[str]
    points: Table
    facts: dict[str, str]
    conditions: Table
    launches: Table


def build_page(
    studies: Sequence[Study],
    charts: Sequence[Chart],
    conclusions: Sequence[str],
    page: Path,
    folder: Path,
    pictures: str,
) -> str:
    """Builds the page of the first study; a second one is compared with it."""
    analysis = studies[0].analysis
    settings = len(analysis.settings)
    figures = json.dumps([figure_of(chart) for chart in charts], allow_nan=False, separators=(",", ":"))
    return page_template("page.html").render(
        title=_title(analysis.definition),
        subtitle=_subtitle(analysis, studies),
        conclusions=conclusions,
        settings=f"{settings} setting{'' if settings == 1 else 's'}",
        rule=_RULE,
        charts=list(zip(charts, _find_wide(charts), strict=True)),
        studies=[_section(study, page) for study in studies],
        folder=str(folder),
        pictures=pictures,
        figures=Markup(figures.replace("<", "\\u003c")),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
        on_black=ON_BLACK,
        script=Markup((_HERE / "page.js").read_text()),
    )


def page_template(name: str, *folders: Path) -> Template:
    """A template of a page; the table macros and the style of the study's page can be used in it."""
    environment = Environment(
        loader=FileSystemLoader([*folders, _HERE]), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["breakable"] = _breakable
    environment.globals["style"] = Markup((_HERE / "page.css").read_text())
    environment.globals["version"] = versions().get("tutti-train", "")
    return environment.get_template(name)


def _breakable(title: str) -> Markup:
    """Allows a line break after dots and underscores of a title."""
    return Markup(str(escape(title)).replace(".", ".<wbr>").replace("_", "_<wbr>"))


def _title(definition: Definition) -> str:
    is_file = definition.recipe.endswith((".yaml", ".yml"))
    recipe = Path(definition.recipe).stem if is_file else definition.recipe
    if definition.kind == "scale":
        kind = f"{definition.mode.capitalize()} scaling" if definition.mode else "Scaling"
        return f"{kind} of {recipe}"
    return f"{'Learning rates' if definition.goal.kind == 'rate' else 'Sweep'} of {recipe}"


def _subtitle(analysis: Analysis, studies: Sequence[Study]) -> str:
    definition, runs = analysis.definition, analysis.runs
    finished = sum(run.outcome.is_finished for run in runs)
    goal = definition.goal
    goals = {
        "steps": f"{units.count(goal.steps or 0)} steps each after {units.count(goal.warmup_steps)} of warm-up",
        "full": "whole training runs",
        "rate": f"{units.count(goal.steps or 0)} steps each at a constant rate",
        "target": "",
    }
    if goal.metric and goal.target is not None:
        goals["target"] = f"runs to a {units.metric_title(goal.metric)} of {units.metric(goal.metric, goal.target)}"
    words = [f"{finished} of {len(runs)} points finished", goals[goal.kind], _date(definition.created)]
    if len(studies) > 1:
        words.append(f"compared with {studies[1].name}")
    return " · ".join(word for word in words if word)


def _date(created: str) -> str:
    """A time to the minute."""
    try:
        return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return created


def _find_wide(charts: Sequence[Chart]) -> list[bool]:
    """Returns which charts take a whole row: the large ones, and those without a neighbour."""
    wide = [chart.id in ("metric", "losses") or len(chart.panels) > 1 or _bars(chart) > 8 for chart in charts]
    alone: list[int] = []
    for place, is_wide in enumerate([*wide, True]):
        if is_wide and alone:
            wide[alone.pop()] = True
        elif not is_wide:
            alone = [] if alone else [place]
    return wide


def _bars(chart: Chart) -> int:
    return len(chart.curves[0].x) if chart.kind == "bars" else 0


def _section(study: Study, page: Path) -> StudySection:
    analysis = study.analysis
    definition = analysis.definition
    facts = {
        "recipe": definition.recipe,
        "overrides": " ".join(definition.overrides) or "none",
        "launch line": definition.launch_line,
        "at once": f"{definition.at_once} points" if definition.at_once > 1 else "",
        "on": definition.on or "this machine or allocation",
        "collectives": analysis.links.source if analysis.links else "",
        "made with": ", ".join(f"{name} {version}" for name, version in definition.versions.items()),
    }
    lines = [
        [Cell(run.id), Cell(line)]
        for run in analysis.runs
        if (line := run.outcome.state.launch_line or run.outcome.conditions.get("launch_line"))
    ]
    return StudySection(
        name=study.name,
        settings=settings_table(analysis),
        links=links_table(analysis),
        forecast=forecast_table(study.forecast) if study.forecast else None,
        forecast_notes=_forecast_notes(study),
        checks=checks_table(study.checks.checked, study.checks.places, page),
        check_notes=_check_notes(study),
        points=points_table(analysis, page),
        facts=facts,
        conditions=conditions_table(analysis),
        launches=Table("The command that started each point.", ("point", "launch line"), lines),
    )


def _forecast_notes(study: Study) -> list[str]:
    """Why there is no forecast, or what to know about the one there is."""
    if study.forecast is None:
        return []
    if study.forecast.reason:
        return [f"There is no forecast for more ranks. {study.forecast.reason}"]
    warnings = dict.fromkeys(warning for each in study.forecast.made for warning in each.warnings)
    return [f"{warning[0].upper()}{warning[1:]}." for warning in warnings]


def _check_notes(study: Study) -> list[str]:
    """The record over all forecasts of the project, and the files that could not be read."""
    record = study.checks.record
    words = [f"Over all studies of this project: {record.sentence()}"] if record else []
    return [*words, *study.checks.notes]
