"""The measurements of a study of ranks, its forecast, and earlier forecasts that its runs check."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tutti import units
from tutti.config.recipes import read_yaml
from tutti.errors import ConfigError, DataError, FolderError, TuttiError
from tutti.forecast.advice import UNITS
from tutti.forecast.batches import MeasuredSweep
from tutti.forecast.curve import MeasuredRun, ScalingCurve
from tutti.forecast.forecast import FittedCurve, Forecast, fit_curve, forecast
from tutti.forecast.kept import CheckedForecast, CheckRecord, KeptForecast, check_forecasts, read_kept, summarise_checks
from tutti.forecast.link import measured_link
from tutti.forecast.planning import Campaign, NodeChoice, conclude_forecast
from tutti.forecast.population import Fabric
from tutti.forecast.table import check_curve
from tutti.launch.cluster.resources import Site, load_site
from tutti.runs.step_parts import StepPart
from tutti.study.analysis import Analysis, analyse
from tutti.study.definition import Definition, Mode, StudyFolder, read_definition
from tutti.study.efficiency import median_of_runs
from tutti.study.folder import STUDIES
from tutti.study.outcome import PointOutcome, combined_shares, read_outcomes

LEAST_WINDOWS = 4  # that tell steady waiting from chance
STEADY = 0.5  # the interquartile range of waiting, over its median
TIMES = (2, 4, 8, 16)  # the most measured ranks, in the report of a study
HPC_INTERFACES = ("hsn", "ib", "ipogif")  # Slingshot, InfiniBand, Aries


@dataclass(frozen=True)
class MeasuredStudy:
    """The finished runs of a study of ranks."""

    path: Path
    mode: Mode
    runs: tuple[MeasuredRun, ...]
    gradient_bytes: float | None  # of a step, where the records hold it
    workload: str  # what the runs of two studies share if one can check the forecast of the other
    fabric: Fabric | None = None  # the network between nodes, where the records or the site tell it
    started: Mapping[tuple[int, int], str] = field(default_factory=dict)  # of the first run, by ranks and nodes

    def curve(self, ranks_per_node: int | None = None, least: int = 2) -> ScalingCurve:
        """The runs as a curve, refused where they contradict themselves or are fewer than `least`."""
        return check_curve(self.runs, self.mode, ranks_per_node, str(self.path), least)


def read_study(path: Path) -> MeasuredStudy:
    """The finished runs of the study in a folder."""
    folder = StudyFolder(path)
    definition = read_definition(folder)
    return measure_study(path, definition, read_outcomes(folder, definition))


def measure_study(path: Path, definition: Definition, outcomes: Sequence[PointOutcome]) -> MeasuredStudy:
    """The finished runs among the outcomes of a study."""
    if definition.kind != "scale" or definition.mode is None:
        raise DataError(f"{path} is a study of tutti {definition.kind}: expected one of tutti scale.")
    runs = _measurements(outcomes, path)
    sizes = [each.plan["gradient_bytes"] for each in outcomes if each.plan.get("gradient_bytes")]
    size = float(sizes[0]) if sizes else None
    first = next(each for each in outcomes if each.is_finished and each.windows)
    fabric = _fabric(definition, first)
    workload, started = _workload(definition, first), _started(outcomes)
    return MeasuredStudy(path, definition.mode, tuple(runs), size, workload, fabric, started)


def is_study(path: Path) -> bool:
    """Whether a folder is that of a study."""
    return StudyFolder(path).definition.exists()


def find_studies(root: Path) -> list[Path]:
    """The folders of all studies below a folder."""
    found = []
    for folder, names, files in os.walk(root):
        if StudyFolder(Path(folder)).definition.name in files:
            found.append(Path(folder))
            names.clear()
    return sorted(found)


def read_finished(paths: Sequence[Path]) -> list[MeasuredStudy]:
    """The studies of ranks among some that have a finished run."""
    found = []
    for path in paths:
        with contextlib.suppress(DataError):
            found.append(read_study(path))
    return found


@dataclass(frozen=True)
class StudyForecast:
    """What a study says of more ranks than it measured, or the reason why it says nothing."""

    curve: ScalingCurve | None = None
    made: tuple[Forecast, ...] = ()
    sentences: tuple[str, ...] = ()
    reason: str = ""
    threshold: float = 0.0  # the efficiency that the forecasts are compared with


def forecast_study(
    study: MeasuredStudy,
    threshold: float,
    measured_steps: int,
    fabric: Fabric | None = None,
    collectives: Path | None = None,
) -> StudyForecast:
    """The forecast for 2, 4, 8 and 16 times the measured ranks; `measured_steps` is the length of a run."""
    fabric = fabric or study.fabric
    try:
        curve = check_curve(study.runs, study.mode, None, "this study")
        link = measured_link(curve, collectives, study.gradient_bytes) if collectives else None
        fitted = fit_curve(curve, fabric, link)
    except (DataError, ConfigError) as error:
        return StudyForecast(reason=explain_one_node(study) or str(error))
    made = more_ranks(fitted, threshold)
    if not made:
        return StudyForecast(reason="The global batch does not split over twice the measured ranks.")
    said = conclude_forecast(fitted, made, threshold, fabric, measured_steps)
    return StudyForecast(curve, tuple(made), tuple(said), threshold=threshold)


def more_ranks(fitted: FittedCurve, threshold: float, chosen: Forecast | None = None) -> list[Forecast]:
    """The forecast for 2, 4, 8 and 16 times the measured ranks, and for a chosen number that was not measured."""
    measured = {run.ranks for run in fitted.curve.measurements}
    ranks = {max(measured) * times for times in TIMES} | ({chosen.ranks} if chosen else set()) - measured
    last = fitted.curve.measurements[-1]
    if fitted.curve.mode == "strong" and last.per_rank_batch:  # a rank has one sample at least
        ranks = {each for each in ranks if each <= last.per_rank_batch * last.ranks}
    return forecast(fitted, sorted(ranks), threshold)


@dataclass(frozen=True)
class ProjectChecks:
    """Earlier forecasts beside the runs of one study, and the record over all studies of its project."""

    checked: tuple[CheckedForecast, ...] = ()
    everywhere: tuple[CheckedForecast, ...] = ()  # by the runs of all studies
    record: CheckRecord | None = None  # of everywhere
    notes: tuple[str, ...] = ()  # what could not be read
    places: Mapping[str, Path] = field(default_factory=dict)  # the studies that keep the forecasts, by digest


def check_project(study: MeasuredStudy) -> ProjectChecks:
    """Check the forecasts of all studies beside this one by its runs; the others' runs count in the record."""
    kept: list[KeptForecast] = []
    notes = []
    places = list(_project_studies(study.path))
    keeps: dict[str, Path] = {}
    for place in places:
        try:
            found = read_kept(place)
        except FolderError as error:
            notes.append(str(error))
            continue
        kept += found
        keeps |= {each.digest: place for each in found}
    checked = check_study(kept, study)
    everywhere = list(checked)
    for other in places if kept else ():
        if other.resolve() != study.path.resolve() and _may_check(other, kept):
            everywhere += [each for one in read_finished([other]) for each in check_study(kept, one)]
    everywhere.sort(key=lambda each: each.created)
    return ProjectChecks(tuple(checked), tuple(everywhere), summarise_checks(everywhere), tuple(notes), keeps)


def check_study(kept: Sequence[KeptForecast], study: MeasuredStudy) -> list[CheckedForecast]:
    """The forecasts of the workload of a study beside its runs."""
    same = [each for each in kept if each.workload == study.workload]
    return check_forecasts(same, study.runs, str(study.path), study.started)


@dataclass(frozen=True)
class StudyFacts:
    """A study with its numbers, as a proposal needs it."""

    measured: MeasuredStudy
    analysis: Analysis
    config: Mapping[str, Any]  # of one of its runs

    @property
    def first_run(self) -> Path:
        """The folder of a finished run."""
        return Path(next(run.outcome.folder for run in self.analysis.runs if run.outcome.is_finished))

    @property
    def folders(self) -> dict[int, list[Path]]:
        """The folders of the finished runs by number of ranks."""
        found: dict[int, list[Path]] = {}
        for run in self.analysis.runs:
            if run.outcome.is_finished:
                found.setdefault(run.outcome.point.ranks, []).append(Path(run.outcome.folder))
        return found

    @property
    def plan(self) -> Mapping[str, Any]:
        return next(run.outcome.plan for run in self.analysis.runs if run.outcome.is_finished)

    @property
    def conditions(self) -> Mapping[str, Any]:
        return next(run.outcome.conditions for run in self.analysis.runs if run.outcome.is_finished)


@dataclass(frozen=True)
class ProposedRuns:
    """What is asked for, and what it was computed from."""

    studies: tuple[StudyFacts, ...]  # the first is the one that is forecast
    site: Site
    unit: str  # one of UNITS
    fitted: FittedCurve
    forecast: StudyForecast
    choice: NodeChoice
    campaign: Campaign
    length: str  # of a run, and where it is from: `30 epochs, as in the recipe`
    kept: Path  # the forecast with its digest
    created: str  # when it was made first
    checks: ProjectChecks
    again: str  # the command that writes this page again
    sweep: MeasuredSweep | None = None  # that has measured how long a run takes

    @property
    def is_measured(self) -> bool:
        """Whether the number of ranks of the request is one that was measured."""
        return self.choice.chosen.ranks in {run.ranks for run in self.fitted.curve.measurements}

    @property
    def in_unit(self) -> float:
        """The units of the site in a node-hour."""
        return 1 if self.unit == UNITS[0] else self.site.gpus_per_node or 1


def read_facts(path: Path) -> StudyFacts:
    """A study with a finished run, its numbers, and the resolved recipe of a run."""
    folder = StudyFolder(path)
    definition = read_definition(folder)
    outcomes = read_outcomes(folder, definition)
    measured = measure_study(path, definition, outcomes)
    first = next(each for each in outcomes if each.is_finished)
    config = read_yaml(Path(first.folder) / "config.yaml", "recipe")
    values = {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}
    return StudyFacts(measured, analyse(definition, outcomes), values)


def _project_studies(path: Path) -> Iterator[Path]:
    """The studies of the project of one: all in the nearest folder `studies`, or else the ones beside it."""
    path = path.resolve()
    root = next((parent for parent in path.parents if parent.name == STUDIES), None)
    if root is not None:
        yield from find_studies(root)
    else:
        yield from sorted(found.parent for found in path.parent.glob(f"*/{StudyFolder(path).definition.name}"))


def _may_check(path: Path, kept: Sequence[KeptForecast]) -> bool:
    """Whether a study has a number of ranks that one of the forecasts is for; its runs are not read."""
    with contextlib.suppress(TuttiError):
        ranks = {point.ranks for point in read_definition(StudyFolder(path)).points}
        return any(made.ranks in ranks for each in kept for made in each.forecasts)
    return False


def explain_one_node(study: MeasuredStudy) -> str:
    """Why a study on one node has no forecast, and what to measure; empty for other studies."""
    if any(run.nodes > 1 for run in study.runs):
        return ""
    most = study.runs[-1].ranks
    times = "3 or 4 nodes" if study.fabric is Fabric.TCP else "2 nodes, or 3 or 4 on Ethernet"
    return (
        f"Everything was measured on one node (up to {units.count(most, 'rank')}), which does not show the link "
        f"between nodes. Measure {times}, with {units.count(most, 'rank')} on each, beside this node. Without that, "
        "tutti forecast takes a given link (--link), or prints the band of published curves (--band)."
    )


def _fabric(definition: Definition, run: PointOutcome) -> Fabric | None:
    """TCP for ranks on CPUs, which Gloo connects; else what the interface of the site says, if it is known."""
    if run.conditions.get("device") == "cpu":
        return Fabric.TCP
    try:
        interface = load_site(definition.on).interface if definition.on else None
    except ConfigError:
        return None
    return Fabric.HPC if interface and interface.startswith(HPC_INTERFACES) else None


def _workload(definition: Definition, run: PointOutcome) -> str:
    """Recipe, overrides, device and the batch that stays the same, as text; the batch is compared by its value."""
    batch = "per_rank_batch" if definition.mode == "weak" else "global_batch"
    overrides = sorted(each for each in definition.overrides if not each.startswith("batch."))
    parts = (definition.recipe, *overrides, f"{batch}={run.plan.get(batch)}", run.conditions.get("device"))
    return " ".join(map(str, parts))


def _measurements(outcomes: Sequence[PointOutcome], path: Path) -> list[MeasuredRun]:
    groups: dict[tuple[int, int], list[PointOutcome]] = {}
    for each in outcomes:
        if each.is_finished and each.windows:
            groups.setdefault((each.point.ranks, _nodes(each)), []).append(each)
    if not groups:
        raise DataError(
            f"{path} has no finished run: {_why_none(outcomes)}. Resume it with tutti scale --resume {path}."
        )
    return [_measured(*key, group) for key, group in sorted(groups.items())]


def _measured(ranks: int, nodes: int, group: Sequence[PointOutcome]) -> MeasuredRun:
    speed = median_of_runs([[window.samples_per_second for window in run.windows] for run in group])
    plan = group[0].plan
    batch, total = plan.get("per_rank_batch"), plan.get("global_batch")
    shares = combined_shares(window for run in group for window in run.windows)
    step = total / speed if total else 0.0
    exposed, reading = (
        shares[part] * step if shares and step else None for part in (StepPart.COMMUNICATION, StepPart.DATA)
    )
    return MeasuredRun(ranks, nodes, speed, batch, exposed, reading, _waits_steadily(group))


def _waits_steadily(group: Sequence[PointOutcome]) -> bool:
    """Whether ranks wait for the slowest about equally long in every window."""
    windows = [window for run in group for window in run.windows if window.shares]
    waits = np.array([window.shares[StepPart.STRAGGLER] * window.seconds for window in windows])
    if len(waits) < LEAST_WINDOWS or not np.median(waits):
        return False
    low, middle, high = np.percentile(waits, [25, 50, 75])
    return bool(high - low < STEADY * middle)


def _nodes(outcome: PointOutcome) -> int:
    return max(1, len(set(outcome.conditions.get("hosts", ()))))


def _started(outcomes: Sequence[PointOutcome]) -> dict[tuple[int, int], str]:
    """When the first finished run of each number of ranks and nodes began."""
    found: dict[tuple[int, int], str] = {}
    for each in outcomes:
        began = each.conditions.get("started")
        if each.is_finished and each.windows and isinstance(began, str):
            place = (each.point.ranks, _nodes(each))
            found[place] = min(began, found.get(place, began))
    return found


def _why_none(outcomes: Sequence[PointOutcome]) -> str:
    if not outcomes:
        return "it has no points"
    failed = [each for each in outcomes if each.state.state == "failed"]
    if not failed:
        return f"{units.count(len(outcomes), 'point')} have not run to their end"
    reason = failed[0].state.reason or "no reason was recorded"
    return f"{len(failed)} of {units.count(len(outcomes), 'point')} failed ({failed[0].point.id}: {reason})"
