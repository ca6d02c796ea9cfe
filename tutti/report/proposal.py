"""The page of an allocation request, from scaling studies: as HTML, Markdown and LaTeX, with figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tutti import units
from tutti.errors import FolderError
from tutti.forecast.kept import describe_record
from tutti.forecast.planning import chance, checkpoint_size, data_size, log_bytes_a_step
from tutti.forecast.studies import ProposedRuns
from tutti.report.study.charts import Study
from tutti.report.study.page import page_template
from tutti.report.study.pictures import draw_charts
from tutti.report.study.scale_charts import scale_charts
from tutti.report.study.tables import Cell, Table, checks_table, forecast_table, link_to, settings_table
from tutti.runs.files import write_durably
from tutti.study.folder import STUDIES

NAME = "proposal"
FIGURES = "figures"
_STEPS = 120  # of a timed run of tutti scale, with its warm-up
_HERE = Path(__file__).parent
_LAW = "the law of tutti forecast (compute, exchange between nodes, friction) with what published curves say about it"
_LINK = "the measured parts of a step, with the exchange as the known link has it"
_TEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "/": r"/\allowbreak{}"}
)


@dataclass
class Sources:
    """The folders and files that numbers come from, each with a label."""

    found: dict[Path, str] = field(default_factory=dict)

    def cell(self, *paths: Path) -> Cell:
        """A cell that leads to the sources."""
        labels = [self.found.setdefault(path, f"S{len(self.found) + 1}") for path in paths]
        text = labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}" if labels else ""
        return Cell(text, link=f"#{labels[0]}" if labels else None)


@dataclass(frozen=True)
class ProposalPart:
    """A part of the page, in the order in which it is shown."""

    title: str
    paragraphs: Sequence[str] = ()
    items: Sequence[str] = ()
    tables: Sequence[Table] = ()
    commands: Sequence[str] = ()
    figures: Sequence[tuple[str, str]] = ()  # name without ending, and caption


def write_proposal(folder: Path, proposed: ProposedRuns) -> list[Path]:
    """Write proposal.html, proposal.md, proposal.tex and the figures into a folder."""
    main = proposed.studies[0]
    studies = [Study("measured", main.analysis, proposed.forecast)]
    charts = [chart for chart in scale_charts(studies) if chart.id in ("throughput", "forecast")]
    page = folder / f"{NAME}.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_charts(charts, folder / FIGURES)
        sources = Sources()
        parts = [*_parts(proposed, sources, page, [(chart.id, chart.caption) for chart in charts])]
        parts.append(_source_part(sources, page))
        title = f"{units.count(proposed.campaign.runs, 'run')} of {main.analysis.definition.recipe}"
        values = {"title": f"{title} on {proposed.site.name}", "parts": parts, "figures": FIGURES}
        texts = {
            ".html": page_template(f"{NAME}.html", _HERE).render(values),
            ".md": _markdown().get_template(f"{NAME}.md").render(values),
            ".tex": _latex().get_template(f"{NAME}.tex").render(values),
        }
        for ending, text in texts.items():
            write_durably(folder / f"{NAME}{ending}", text)
    except OSError as error:
        raise FolderError(
            f"{error.filename or folder}: the proposal cannot be written: {error.strerror}. Choose another --out."
        ) from error
    return [folder / f"{NAME}{ending}" for ending in texts]


def escape_tex(value: Any) -> str:
    """Text for LaTeX; what is marked as markup stays as it is."""
    if isinstance(value, Markup):
        return str(value)
    return str(value).encode("latin-1", "replace").decode("latin-1").translate(_TEX)


def tex_columns(table: Table) -> Markup:
    """The columns of a table: numbers to the right, long words in paragraphs that share the rest of the width."""
    longest = [max(len(row[place].text) for row in table.rows) for place in range(len(table.titles))]
    wide = [number for number in longest if number > 24]
    rest = max(0.94 - 0.012 * sum(number for number in longest if number <= 24), 0.3)
    return Markup(
        "".join(
            "r" if is_number else f"p{{{rest * long / sum(wide):.2f}\\linewidth}}" if long > 24 else "l"
            for is_number, long in zip(table.number_columns, longest, strict=True)
        )
    )


def _latex() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        block_start_string="((*",
        block_end_string="*))",
        variable_start_string="(((",
        variable_end_string=")))",
        comment_start_string="((=",
        comment_end_string="=))",
        finalize=escape_tex,
    )
    found.filters["columns"] = tex_columns
    return found


def _markdown() -> Environment:
    def escape(value: Any) -> str:
        text = str(value)
        return text if isinstance(value, Markup) else text.replace("|", "\\|").replace("<", "&lt;")

    return Environment(loader=FileSystemLoader(_HERE), undefined=StrictUndefined, trim_blocks=True, finalize=escape)


def _parts(
    proposed: ProposedRuns, sources: Sources, page: Path, charts: Sequence[tuple[str, str]]
) -> list[ProposalPart]:
    main = proposed.studies[0]
    measured = [each for each in charts if each[0] == "throughput"]
    ahead = [each for each in charts if each[0] == "forecast"]
    return [
        ProposalPart("Request", [request_sentence(proposed)]),
        ProposalPart("Machine and software", tables=[_facts(_machine(proposed), sources, main.first_run)]),
        ProposalPart("Workload", tables=[_workload_table(proposed, sources)]),
        ProposalPart("Measured", tables=_measured_tables(proposed, sources), figures=measured),
        replace(_forecast_part(proposed, sources), figures=ahead),
        ProposalPart("Number of nodes", [proposed.choice.reason]),
        ProposalPart("Time to solution and cost", [_covered(proposed)], tables=[_cost_table(proposed, sources)]),
        ProposalPart("Input and output", tables=[_volumes(proposed, sources)]),
        ProposalPart("What was not measured", items=_not_measured(proposed)),
        _verification(proposed),
        _checked_part(proposed, page),
    ]


def request_sentence(proposed: ProposedRuns) -> str:
    """What is asked for, in the unit of the site."""
    campaign, asked = proposed.campaign, proposed.campaign.request * proposed.in_unit
    hours = units.interval(_hours, campaign.hours[1], campaign.hours[0], campaign.hours[2])
    return (
        f"{units.number(asked)} {proposed.unit} for {units.count(campaign.runs, 'run')} on "
        f"{units.count(campaign.made.nodes, 'node')} ({units.count(campaign.made.ranks, 'rank')}): {hours} a run with "
        f"a 90% interval, plus a contingency of {units.percent(campaign.contingency)}. A run is {proposed.length}."
    )


def _machine(proposed: ProposedRuns) -> list[tuple[str, str]]:
    facts = proposed.studies[0].conditions
    hardware, versions = facts.get("hardware") or {}, facts.get("versions") or {}
    hosts = len({host for run in proposed.studies[0].analysis.runs for host in run.outcome.conditions.get("hosts", ())})
    return [
        ("site", f"{proposed.site.name}: {proposed.site.about}".rstrip(": ")),
        (
            "submitted to",
            proposed.studies[0].analysis.definition.on or "nothing: started inside an allocation, or here",
        ),
        ("device", str(facts.get("device", ""))),
        ("processor", f"{hardware.get('processor', '')}, {units.count(hardware.get('cores') or 0, 'core')}"),
        ("memory", f"{hardware.get('memory_gib', '')} GiB"),
        ("nodes measured", units.count(hosts)),
        ("system", str(hardware.get("system", ""))),
        ("launcher", str(facts.get("launcher", ""))),
        ("software", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", str(facts.get("commit") or "not recorded")),
    ]


def _workload(proposed: ProposedRuns) -> list[tuple[str, str]]:
    main, campaign = proposed.studies[0], proposed.campaign
    plan, config = main.plan, main.config
    definition = main.analysis.definition
    return [
        ("recipe", " ".join([definition.recipe, *definition.overrides])),
        ("model", str((config.get("model") or {}).get("name", ""))),
        ("parameters", units.count(plan.get("parameters") or 0)),
        ("gradients of a step", units.size(plan.get("gradient_bytes") or 0)),
        ("precision", str(config.get("precision", ""))),
        ("optimizer", str((config.get("optim") or {}).get("name", ""))),
        ("data", str((config.get("data") or {}).get("name", ""))),
        ("training samples", units.count(plan.get("train_samples") or 0)),
        ("global batch", f"{units.count(campaign.global_batch)} on {units.count(campaign.made.ranks, 'rank')}"),
        ("steps of a run", f"{units.count(campaign.steps)} ({proposed.length})"),
    ]


def _facts(facts: Sequence[tuple[str, str]], sources: Sources, run: Path) -> Table:
    rows = [[Cell(name), Cell(value), sources.cell(run)] for name, value in facts if value.strip(", ")]
    return Table("From the record and the recipe of a run.", ("item", "value", "source"), rows)


def _workload_table(proposed: ProposedRuns, sources: Sources) -> Table:
    table = _facts(_workload(proposed), sources, proposed.studies[0].first_run)
    if proposed.sweep:
        table.rows[-1][-1] = sources.cell(proposed.sweep.path)
    return table


def _measured_tables(proposed: ProposedRuns, sources: Sources) -> list[Table]:
    """Weak and strong apart, with the folders of the runs of each line."""
    found = []
    for study in sorted(proposed.studies, key=lambda each: each.measured.mode != "weak"):
        table = settings_table(study.analysis)
        folders = study.folders
        nodes = {run.ranks: run.nodes for run in study.measured.runs}
        rows = [
            [row[0], Cell(units.count(nodes[ranks]), True), *row[1:], sources.cell(*folders[ranks])]
            for row in table.rows
            if (ranks := int(row[0].text)) in folders
        ]
        definition = study.analysis.definition
        words = " ".join([definition.recipe, *definition.overrides])
        caption = f"{study.measured.mode.capitalize()} scaling of {words}. {table.caption}"
        found.append(Table(caption, ("ranks", "nodes", *table.titles[1:], "source"), rows))
    return found


def _forecast_part(proposed: ProposedRuns, sources: Sources) -> ProposalPart:
    table = forecast_table(proposed.forecast)
    assert table is not None
    rows = [[*row, sources.cell(proposed.kept)] for row in table.rows]
    made = proposed.forecast.made
    warnings = dict.fromkeys(warning for each in made for warning in each.warnings)
    return ProposalPart(
        "Forecast",
        [
            f"Basis: {made[-1].basis.removeprefix('from ')}. Kept on {proposed.created[:10]} with the digest "
            f"{proposed.kept.stem} of all that it was made from. Nothing in this table was measured."
        ],
        [
            f"Assumed: {_LINK if proposed.fitted.by_parts else _LAW}; the same software, batch and placement of ranks "
            "as measured.",
            *(f"{warning[0].upper()}{warning[1:]}." for warning in warnings),
        ],
        [replace(table, titles=(*table.titles, "source"), rows=rows)],
    )


def _covered(proposed: ProposedRuns) -> str:
    campaign = proposed.campaign
    return (
        f"The request is the median of the cost of all runs plus {units.percent(campaign.contingency)} for job starts, "
        "validation, checkpoints, repeated runs and the error of the forecast. If nothing but the forecast were wrong, "
        f"it would be enough with a probability of {chance(campaign.is_covered)}."
    )


def _cost_table(proposed: ProposedRuns, sources: Sources) -> Table:
    campaign, main = proposed.campaign, proposed.studies[0]
    nodes, more = campaign.made.nodes, 1 + campaign.contingency
    source = sources.cell(*(main.folders[campaign.made.ranks] if proposed.is_measured else [proposed.kept]))
    lines = [
        ("hours of a run", campaign.hours),
        ("node-hours of a run", tuple(nodes * each for each in campaign.hours)),
        (f"node-hours of {units.count(campaign.runs, 'run')}", campaign.node_hours),
        (
            f"the same with {units.percent(campaign.contingency)} contingency",
            tuple(more * x for x in campaign.node_hours),
        ),
    ]
    if proposed.site.gpus_per_node:
        each = proposed.site.gpus_per_node * more
        lines.append(("the same in GPU-hours", tuple(each * hours for hours in campaign.node_hours)))
    rows = [[Cell(name), *(Cell(units.number(value), True) for value in values), source] for name, values in lines]
    return Table("Quantiles of the forecast.", ("cost", "5%", "50%", "95%", "source"), rows)


def _volumes(proposed: ProposedRuns, sources: Sources) -> Table:
    main, campaign = proposed.studies[0], proposed.campaign
    keep = (main.config.get("checkpoint") or {}).get("keep") or 1
    outcomes = [run.outcome for run in main.analysis.runs if run.outcome.is_finished]
    size, origin = checkpoint_size(outcomes, str((main.config.get("optim") or {}).get("name")))
    log = log_bytes_a_step(outcomes[0]) * campaign.steps
    data, where = data_size(main.config.get("data") or {})
    run = sources.cell(main.first_run)
    rows = [
        [Cell("input: data set"), Cell(data, True), Cell(data, True), Cell(where), run],
        [
            Cell(f"output: {units.count(keep, 'checkpoint')} kept"),
            Cell(units.size(keep * size), True),
            Cell(units.size(campaign.runs * keep * size), True),
            Cell(f"{units.size(size)} each, {origin}"),
            run,
        ],
        [
            Cell("output: logs and metrics"),
            Cell(units.size(log), True),
            Cell(units.size(campaign.runs * log), True),
            Cell("as many bytes a step as measured"),
            run,
        ],
    ]
    return Table("Volumes on the file system.", ("volume", "a run", "all runs", "basis", "source"), rows)


def _not_measured(proposed: ProposedRuns) -> list[str]:
    main, campaign = proposed.studies[0], proposed.campaign
    most, nodes = proposed.fitted.curve.most_nodes, campaign.made.nodes
    largest = max(run.outcome.plan.get("global_batch") or 0 for run in main.analysis.runs)
    found = []
    if nodes > most:
        found.append(f"{units.count(nodes, 'node')}: at most {units.count(most, 'node')} were measured.")
    if main.analysis.definition.on != proposed.site.name:
        found.append(f"{proposed.site.name} itself: the records of the study do not name this site.")
    gpus, per_node = proposed.site.gpus_per_node, proposed.fitted.curve.ranks_per_node
    if gpus and gpus != per_node:
        found.append(
            f"Full nodes: the study has {units.count(per_node, 'rank')} on a node, {proposed.site.name} {gpus} GPUs."
        )
    if proposed.sweep:
        largest, where = (
            proposed.sweep.largest_reached.global_batch,
            "the largest with which the sweep reached its target",
        )
    else:
        where = "the largest in the study, for a few steps,"
    if campaign.global_batch > largest:
        batch = units.count(campaign.global_batch)
        found.append(f"Whether training converges with a global batch of {batch}: {where} is {units.count(largest)}.")
    elif proposed.sweep is None:
        found.append("Convergence: the runs of the study are timed, and not trained to an end.")
    found.append("Job starts, validation and checkpoints: they are not part of the step times.")
    found.append("The file system when all nodes of a job, and several jobs, read and write at once.")
    if all(point.runs == 1 for point in (main.analysis.scaling.points if main.analysis.scaling else ())):
        found.append("The variation between runs: there is one run of each number of ranks.")
    return found


def _verification(proposed: ProposedRuns) -> ProposalPart:
    main, made = proposed.studies[0], proposed.campaign.made
    definition, curve = main.analysis.definition, proposed.fitted.curve
    last = curve.measurements[-1]
    batch = (
        f"batch.per_rank={last.per_rank_batch:g}"
        if curve.mode == "weak"
        else f"batch.global={proposed.campaign.global_batch}"
    )
    others = [word for word in definition.overrides if not word.startswith("batch.")]
    account = " --account ACCOUNT" if proposed.site.account_required and not proposed.site.account else ""
    command = (
        f"tutti scale {' '.join([definition.recipe, *others, batch])} --ranks {made.ranks} --mode {curve.mode} "
        f"--repeat 3 --on {proposed.site.name} --ranks-per-node {curve.ranks_per_node}{account}"
    )
    seconds = 3 * _STEPS * proposed.campaign.global_batch / made.samples_per_second
    cost = f"three timed runs of {_STEPS} steps, about {units.number(seconds * made.nodes / 3600)} node-hours"
    nodes = units.count(made.nodes, "node")
    said = f"Before the campaign, {nodes} are measured on {proposed.site.name}: {cost}."
    check = [] if proposed.is_measured else [f"tutti forecast --verify{_project(main.measured.path)}"]
    if check:
        said += " The second command sets the forecast beside the result, the third writes this page again with it."
    return ProposalPart("Verification", [said], commands=[command, *check, proposed.again])


def _project(study: Path) -> str:
    """The option that names the folder of all studies, unless it is `runs`."""
    root = next((parent.parent for parent in study.parents if parent.name == STUDIES), study.parent)
    return "" if root == Path("runs") else f" --out {root}"


def _checked_part(proposed: ProposedRuns, page: Path) -> ProposalPart:
    checks = proposed.checks
    mine = [each for each in checks.everywhere if each.workload == proposed.studies[0].measured.workload]
    table = checks_table(mine, checks.places, page)
    said = ["None of the forecast runs has been measured yet."]
    if checks.everywhere:
        said = [f"Over all studies of this project: {describe_record(checks.everywhere)}"]
    return ProposalPart("Forecast and measurement", [*said, *checks.notes], tables=[table] if table else [])


def _source_part(sources: Sources, page: Path) -> ProposalPart:
    rows = [
        [Cell(label, kind=label), Cell(str(path), link=link_to(path, page))] for path, label in sources.found.items()
    ]
    return ProposalPart("Sources", tables=[Table("Run folders and files.", ("source", "folder or file"), rows)])


def _hours(hours: float) -> str:
    return f"{units.number(hours)} h"
