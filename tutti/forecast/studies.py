"""The measurements of a finished study of ranks, as a forecast needs them."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tutti import units
from tutti.errors import DataError
from tutti.forecast.curve import MeasuredRun, ScalingCurve
from tutti.forecast.table import check_curve
from tutti.runs.step_parts import StepPart
from tutti.study.definition import Definition, Mode, StudyFolder, read_definition
from tutti.study.efficiency import median_of_runs
from tutti.study.outcome import PointOutcome, combined_shares, read_outcomes

LEAST_WINDOWS = 4  # that tell steady waiting from chance
STEADY = 0.5  # the interquartile range of waiting, over its median


@dataclass(frozen=True)
class MeasuredStudy:
    """The finished runs of a study of ranks."""

    path: Path
    mode: Mode
    runs: tuple[MeasuredRun, ...]
    gradient_bytes: float | None  # of a step, where the records hold it
    workload: str  # what the runs of two studies share if one can check the forecast of the other

    def curve(self, ranks_per_node: int | None = None, least: int = 2) -> ScalingCurve:
        """The runs as a curve, refused where they contradict themselves or are fewer than `least`."""
        return check_curve(self.runs, self.mode, ranks_per_node, str(self.path), least)


def read_study(path: Path) -> MeasuredStudy:
    """The finished runs of the study in a folder."""
    folder = StudyFolder(path)
    definition = read_definition(folder)
    if definition.kind != "scale" or definition.mode is None:
        raise DataError(f"{path} is a study of tutti {definition.kind}: expected one of tutti scale.")
    outcomes = read_outcomes(folder, definition)
    runs = _measurements(outcomes, path)
    sizes = [each.plan["gradient_bytes"] for each in outcomes if each.plan.get("gradient_bytes")]
    size = float(sizes[0]) if sizes else None
    first = next(each for each in outcomes if each.is_finished and each.windows)
    return MeasuredStudy(path, definition.mode, tuple(runs), size, _workload(definition, first))


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


def _why_none(outcomes: Sequence[PointOutcome]) -> str:
    if not outcomes:
        return "it has no points"
    failed = [each for each in outcomes if each.state.state == "failed"]
    if not failed:
        return f"{units.count(len(outcomes), 'point')} have not run to their end"
    reason = failed[0].state.reason or "no reason was recorded"
    return f"{len(failed)} of {units.count(len(outcomes), 'point')} failed ({failed[0].point.id}: {reason})"
