"""The measurements of a finished study of ranks, as a forecast needs them."""

from collections.abc import Sequence
from pathlib import Path

from tutti import units
from tutti.errors import DataError
from tutti.forecast.curve import MeasuredRun, ScalingCurve
from tutti.forecast.table import check_curve
from tutti.runs.step_parts import StepPart
from tutti.study.definition import StudyFolder, read_definition
from tutti.study.efficiency import median_of_runs
from tutti.study.outcome import PointOutcome, combined_shares, read_outcomes


def read_study(path: Path, ranks_per_node: int | None) -> tuple[ScalingCurve, float | None]:
    """The curve of a study, and the bytes of gradients of a step where its records hold them."""
    folder = StudyFolder(path)
    definition = read_definition(folder)
    if definition.kind != "scale" or definition.mode is None:
        raise DataError(f"{path} is a study of tutti {definition.kind}: expected one of tutti scale.")
    outcomes = read_outcomes(folder, definition)
    runs = _measurements(outcomes, path)
    sizes = [each.plan["gradient_bytes"] for each in outcomes if each.plan.get("gradient_bytes")]
    return check_curve(runs, definition.mode, ranks_per_node, str(path)), float(sizes[0]) if sizes else None


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
    share = shares.get(StepPart.COMMUNICATION)
    exposed = share * total / speed if share is not None and total else None
    return MeasuredRun(ranks, nodes, speed, batch, exposed)


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
