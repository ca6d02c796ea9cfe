"""One page of HTML that shows a study, with all it needs inside: it opens from a file, without a network."""

import json
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from tutti.report.study.charts import Chart, Study
from tutti.report.study.plotly import figure_of
from tutti.report.study.tables import Cell, Table, conditions_table, links_table, points_table, settings_table
from tutti.runs.record import versions
from tutti.study.analysis import Analysis
from tutti.study.conclusions import conclude
from tutti.study.definition import Definition
from tutti.study.numbers import count, metric_number, metric_words

_HERE = Path(__file__).parent
_LONG = 40  # rows of a table that scrolls by itself
_RULE = (
    "Drawn by rule from the numbers below. Intervals hold 95 % of 1,000 bootstrap draws over runs and the log windows "
    "within them; with one run at a setting they say nothing of what differs from run to run. A run has collapsed when "
    "its loss is not finite or ends above its start, or its accuracy ends within 1.5 times chance. Outliers are more "
    "than 3.5 scaled median absolute deviations from the median, and 1 % (windows) or 5 % (runs); they are marked and "
    "never dropped."
)


def build_page(studies: Sequence[Study], charts: Sequence[Chart], page: Path, folder: Path, pictures: str) -> str:
    """The whole page; the first study is its subject, a second one is compared with it."""
    analysis = studies[0].analysis
    other = studies[1].analysis if len(studies) > 1 else None
    figures = json.dumps([figure_of(chart) for chart in charts], allow_nan=False, separators=(",", ":"))
    return Template((_HERE / "page.html").read_text()).substitute(
        version=escape(versions().get("tutti-train", "")),
        title=escape(_title(analysis.definition)),
        subtitle=escape(_subtitle(analysis, studies)),
        style=(_HERE / "page.css").read_text(),
        conclusions=_sentences(conclude(analysis, other), analysis),
        rule=escape(_RULE),
        charts=_charts(charts) or "<p>There is nothing to draw yet.</p>",
        settings="\n".join(_settings(each, len(studies)) for each in studies),
        points="\n".join(_named_table(points_table(each.analysis, page), each.name, len(studies)) for each in studies),
        conditions="\n".join(_conditions(each, len(studies)) for each in studies),
        folder=escape(str(folder)),
        pictures=escape(pictures),
        figures=figures.replace("<", "\\u003c"),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        script=(_HERE / "page.js").read_text(),
    )


def _title(definition: Definition) -> str:
    is_file = definition.recipe.endswith((".yaml", ".yml"))
    recipe = Path(definition.recipe).stem if is_file else definition.recipe
    if definition.kind == "scale":
        kind = f"{definition.mode.capitalize()} scaling" if definition.mode else "Scaling"
        return f"{kind} of {recipe}"
    return f"Sweep of {recipe}"


def _subtitle(analysis: Analysis, studies: Sequence[Study]) -> str:
    definition, runs = analysis.definition, analysis.runs
    finished = sum(run.outcome.is_finished for run in runs)
    goal = definition.goal
    goals = {
        "steps": f"{count(goal.steps or 0)} steps each after {count(goal.warmup_steps)} of warm-up",
        "full": "whole training runs",
        "target": "",
    }
    if goal.metric and goal.target is not None:
        goals["target"] = f"runs to a {metric_words(goal.metric)} of {metric_number(goal.metric, goal.target)}"
    words = [f"{finished} of {len(runs)} points finished", goals[goal.kind], _date(definition.created)]
    if len(studies) > 1:
        words.append(f"compared with {studies[1].name}")
    return " · ".join(word for word in words if word)


def _date(created: str) -> str:
    """A time as people write it, to the minute."""
    try:
        return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M %Z}".strip()
    except ValueError:
        return created


def _sentences(sentences: Sequence[str], analysis: Analysis) -> str:
    if not sentences:
        settings = len(analysis.settings)
        return f"<p>There is nothing to conclude from {settings} setting{'' if settings == 1 else 's'}.</p>"
    return '<ul class="conclusions">' + "".join(f"<li>{escape(each)}</li>\n" for each in sentences) + "</ul>"


def _charts(charts: Sequence[Chart]) -> str:
    """All charts, two beside each other; one that would stand alone in its row takes all of it."""
    wide = [chart.id in ("metric", "losses") or len(chart.panels) > 1 or _bars(chart) > 8 for chart in charts]
    alone: list[int] = []
    for place, is_wide in enumerate([*wide, True]):
        if is_wide and alone:
            wide[alone.pop()] = True
        elif not is_wide:
            alone = [] if alone else [place]
    return "\n".join(_chart(chart, is_wide) for chart, is_wide in zip(charts, wide, strict=True))


def _bars(chart: Chart) -> int:
    return len(chart.curves[0].x) if chart.kind == "bars" else 0


def _chart(chart: Chart, is_wide: bool) -> str:
    switches = _switch("way", chart, "along the axis", chart.switch) if chart.other_axis else ""
    if chart.close_up:
        switches += _switch("view", chart, "up the axis", ("whole range", "close up"))
    return (
        f"<figure{' class=wide' if is_wide else ''}>"
        f'<div class="heading"><h3>{escape(chart.title)}</h3>{switches}</div>'
        f'<div class="plot" id="{chart.id}" role="img" aria-label="{escape(f"{chart.title}. {chart.caption}")}"></div>'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def _switch(what: str, chart: Chart, label: str, names: Sequence[str]) -> str:
    """Two buttons, of which one is pressed."""
    buttons = "".join(
        f'<button type="button" data-chart="{chart.id}" data-{what}="{number}" '
        f'aria-pressed="{str(number == 0).lower()}">{escape(name)}</button>'
        for number, name in enumerate(names)
    )
    return f'<div class="switch" role="group" aria-label="{label}">{buttons}</div>'


def _settings(study: Study, studies: int) -> str:
    links = links_table(study.analysis)
    found = _named_table(settings_table(study.analysis), study.name, studies)
    return found + (f'<div class="narrow">{_table(links)}</div>' if links else "")


def _named_table(table: Table, name: str, studies: int) -> str:
    """A table; with the name of its study where there are two."""
    return (f"<h3>{escape(name)}</h3>" if studies > 1 else "") + _table(table)


def _table(table: Table) -> str:
    numbers = [
        bool(table.rows) and all(row[place].is_number for row in table.rows) for place in range(len(table.titles))
    ]
    heads = "".join(
        f'<th scope="col"{" class=number" if is_number else ""}>{_breakable(title)}</th>'
        for title, is_number in zip(table.titles, numbers, strict=True)
    )
    rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    return (
        f'<div class="scroll{" long" if len(table.rows) > _LONG else ""}" tabindex="0" role="region" '
        f'aria-label="{escape(table.caption)}"><table>'
        f"<caption><span>{escape(table.caption)}</span></caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _breakable(title: str) -> str:
    """A title that may go on in another line after a dot or an underscore."""
    return escape(title).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    if cell.link is not None:
        text = f'<a href="{escape(cell.link)}">{text}</a>'
    if cell.kind:
        text = f'<span class="state {escape(cell.kind)}">{text}</span>'
    kind = (
        ' class="name"'
        if cell.link
        else ' class="number"'
        if cell.is_number
        else ' class="words"'
        if len(cell.text) > 30
        else ""
    )
    return f"<td{kind}>{text}</td>"


def _conditions(study: Study, studies: int) -> str:
    definition = study.analysis.definition
    facts = {
        "recipe": definition.recipe,
        "overrides": " ".join(definition.overrides) or "none",
        "launch line": definition.launch_line,
        "at once": f"{definition.at_once} points" if definition.at_once > 1 else "",
        "on": definition.on or "ranks started here, or inside the allocation",
        "collectives": study.analysis.links.source if study.analysis.links else "",
        "made with": ", ".join(f"{name} {version}" for name, version in definition.versions.items()),
    }
    listed = "".join(f"<dt>{escape(k)}</dt><dd><code>{escape(v)}</code></dd>" for k, v in facts.items() if v)
    lines = [
        [Cell(run.id), Cell(line)]
        for run in study.analysis.runs
        if (line := run.outcome.state.launch_line or run.outcome.conditions.get("launch_line"))
    ]
    launches = _table(Table("How each point was started.", ("point", "launch line"), lines))
    return (
        (f"<h3>{escape(study.name)}</h3>" if studies > 1 else "")
        + f"<dl>{listed}</dl>"
        + f'<div class="narrow">{_table(conditions_table(study.analysis))}</div>'
        + f"<details><summary>Launch lines of {len(lines)} points</summary>{launches}</details>"
    )
