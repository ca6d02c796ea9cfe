"""Writes the report of a study: a page, pictures, and the points as CSV, from the study folder."""

from dataclasses import dataclass, replace
from pathlib import Path

from tutti.errors import ConfigError, FolderError
from tutti.forecast.kept import summarise_checks
from tutti.forecast.population import Fabric
from tutti.forecast.studies import check_project, forecast_study, measure_study
from tutti.report.study.charts import Study
from tutti.report.study.learning_charts import learning_charts
from tutti.report.study.page import build_page
from tutti.report.study.pictures import draw_charts
from tutti.report.study.scale_charts import scale_charts
from tutti.report.study.tables import points_csv
from tutti.runs.files import write_durably
from tutti.study.analysis import Analysis, analyse
from tutti.study.conclusions import GOOD, conclude
from tutti.study.definition import StudyFolder, read_definition
from tutti.study.links import match_links
from tutti.study.outcome import read_outcomes

_STEPS = 100  # of a further measurement, where the runs of a study are whole trainings


@dataclass(frozen=True)
class StudyReport:
    """The paths of the report, and its conclusions."""

    page: Path
    pictures: Path
    points: Path
    conclusions: list[str]


def write_report(
    folder: Path,
    compare: Path | None = None,
    out: Path | None = None,
    collectives: Path | None = None,
    fabric: Fabric | None = None,
) -> StudyReport:
    """Writes the report of a study into its folder, or to the file `out` with the pictures beside it."""
    this = read_study(folder, collectives)
    other = read_study(compare, collectives) if compare is not None else None
    folders = [folder, compare] if compare is not None else [folder]
    studies = [
        _with_forecast(each, path, fabric, collectives)
        for each, path in zip(_named(this, other, folder, compare), folders, strict=True)
    ]
    report = _places(folder, out, conclude(this, other, _ahead(studies[0])))
    charts = [*scale_charts(studies), *learning_charts(studies)]
    page = build_page(studies, charts, report.conclusions, report.page, folder, report.pictures.name)
    try:
        draw_charts(charts, report.pictures)
        write_durably(report.points, points_csv(this))
        write_durably(report.page, page)
    except OSError as error:
        raise FolderError(
            f"{error.filename or report.page}: the report cannot be written: {error.strerror}. "
            "Choose another place with --out FILE."
        ) from error
    return report


def read_study(folder: Path, collectives: Path | None = None) -> Analysis:
    """Analyses the study in a folder, and compares it with a measurement of collectives if given."""
    study = StudyFolder(folder)
    definition = read_definition(study)
    if collectives is not None and definition.kind != "scale":
        raise ConfigError(
            f"--collectives {collectives}: {folder} is a {definition.kind}, on one number of ranks: expected a "
            "scaling study, by tutti scale. Leave out --collectives."
        )
    outcomes = read_outcomes(study, definition)
    analysis = analyse(definition, outcomes)
    if collectives is None or analysis.scaling is None:
        return analysis
    return replace(analysis, links=match_links(collectives, analysis.scaling, outcomes))


def _with_forecast(study: Study, folder: Path, fabric: Fabric | None, collectives: Path | None) -> Study:
    """Adds the forecast of a scaling study with finished runs, and earlier forecasts that its runs check."""
    definition = study.analysis.definition
    if study.analysis.scaling is None or definition.mode is None:
        return study
    measured = measure_study(folder, definition, [run.outcome for run in study.analysis.runs])
    steps = definition.goal.warmup_steps + (definition.goal.steps or _STEPS)
    return replace(
        study, forecast=forecast_study(measured, GOOD, steps, fabric, collectives), checks=check_project(measured)
    )


def _ahead(study: Study) -> list[str]:
    """What the forecast of a study says, and how earlier forecasts of its runs have fared."""
    said = list(study.forecast.sentences) if study.forecast else []
    if record := summarise_checks(study.checks.checked):
        said.append(f"These runs check earlier forecasts. {record.sentence()}")
    return said


def _places(folder: Path, out: Path | None, conclusions: list[str]) -> StudyReport:
    if out is None:
        study = StudyFolder(folder)
        return StudyReport(study.report, study.figures, folder / "points.csv", conclusions)
    if out.suffix.lower() not in (".html", ".htm"):
        raise FolderError(f"--out {out}: expected the name of an HTML file, such as {out.with_suffix('.html')}.")
    if not out.parent.is_dir():
        raise FolderError(f"--out {out}: there is no folder {out.parent}. Create it first, or choose another one.")
    return StudyReport(out, out.with_name(f"{out.stem}_figures"), out.with_name(f"{out.stem}_points.csv"), conclusions)


def _named(this: Analysis, other: Analysis | None, folder: Path, compare: Path | None) -> list[Study]:
    """Returns studies with distinct names: their per-rank batches if these differ, else their folders."""
    if other is None or compare is None:
        return [Study("measured", this)]
    batches = [_rank_batch(each) for each in (this, other)]
    if None not in batches and batches[0] != batches[1]:
        return [Study(f"{batch:,} per rank", each) for batch, each in zip(batches, (this, other), strict=True)]
    names = [folder.resolve().name, compare.resolve().name]
    if names[0] == names[1]:
        names = ["this study", "the other study"]
    return [Study(names[0], this), Study(names[1], other)]


def _rank_batch(analysis: Analysis) -> int | None:
    """The per-rank batch, if it is the same on all numbers of ranks."""
    found = {point.per_rank_batch for point in analysis.scaling.points} if analysis.scaling else set()
    return found.pop() if len(found) == 1 else None
