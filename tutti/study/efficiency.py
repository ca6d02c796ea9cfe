"""How a recipe scales with ranks: speed, speed-up and efficiency with intervals, and what communication takes.

Light: imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.runs.step_parts import SHARES, StepPart
from tutti.study.definition import Definition, Mode
from tutti.study.fits import (
    CommunicationFit,
    Estimate,
    SerialFraction,
    draw_medians,
    estimate,
    fit_amdahl,
    fit_communication,
    fit_gustafson,
    median_of_runs,
)
from tutti.study.outcome import Outcome, Window, shares_together


@dataclass(frozen=True)
class ScalePoint:
    """A number of ranks, from all its finished repeats."""

    ranks: int
    global_batch: int | None
    per_rank_batch: int | None
    runs: int
    windows: int
    speed: Estimate  # samples/s of all ranks
    speedup: Estimate  # against the smallest number of ranks
    efficiency: Estimate  # speed-up by how many times as many ranks there are
    shares: Mapping[StepPart, float]  # by SHARES; empty where phases were not kept
    share_estimates: Mapping[StepPart, Estimate]  # the same, as medians of windows
    step_seconds: float | None

    def seconds(self, part: StepPart) -> Estimate | None:
        """What a part takes of a step."""
        if self.step_seconds is None or part not in self.share_estimates:
            return None
        share = self.share_estimates[part]
        return Estimate(*(self.step_seconds * each for each in (share.value, share.low, share.high)))


@dataclass(frozen=True)
class Scaling:
    """A study of ranks."""

    mode: Mode | None
    points: tuple[ScalePoint, ...]  # by ranks
    serial: SerialFraction | None
    communication: CommunicationFit | None

    def at(self, ranks: int) -> ScalePoint | None:
        return next((point for point in self.points if point.ranks == ranks), None)


def measure_scaling(definition: Definition, outcomes: Sequence[Outcome]) -> Scaling | None:
    """The scaling of all numbers of ranks with a finished run; None where there is none."""
    runs: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.is_finished and outcome.windows:
            runs.setdefault(outcome.point.ranks, []).append(outcome)
    if not runs:
        return None
    speeds, draws = _medians(runs, lambda window, _: window.samples_per_second)
    base = min(runs)
    points = [_point(runs[n], n / base, (speeds[n], speeds[base]), (draws[n], draws[base])) for n in sorted(runs)]
    fit = fit_amdahl if definition.mode == "strong" else fit_gustafson
    communication = fit_communication(*_medians(_with_phases(runs), _communication_seconds))
    return Scaling(definition.mode, tuple(points), fit(speeds, draws), communication)


def _point(
    runs: Sequence[Outcome], more: float, speeds: tuple[float, float], draws: tuple[np.ndarray, np.ndarray]
) -> ScalePoint:
    """One number of ranks, `more` times the smallest, with the speeds of both."""
    first = runs[0]
    batch = first.plan.get("global_batch")
    speedup, drawn = speeds[0] / speeds[1], draws[0] / draws[1]
    return ScalePoint(
        ranks=first.point.ranks,
        global_batch=batch,
        per_rank_batch=first.plan.get("per_rank_batch"),
        runs=len(runs),
        windows=sum(len(run.windows) for run in runs),
        speed=estimate(speeds[0], draws[0]),
        speedup=estimate(speedup, drawn),
        efficiency=estimate(speedup / more, drawn / more),
        shares=shares_together(window for run in runs for window in run.windows),
        share_estimates=_share_estimates(runs),
        step_seconds=batch / speeds[0] if batch else None,
    )


def _share_estimates(runs: Sequence[Outcome]) -> dict[StepPart, Estimate]:
    known = [[window.shares for window in run.windows if window.shares] for run in runs]
    known = [shares for shares in known if shares]
    values = {part: [[each[part] for each in shares] for shares in known] for part in SHARES} if known else {}
    return {part: estimate(median_of_runs(each), draw_medians(each, 0)) for part, each in values.items()}


def _medians(runs, of_window) -> tuple[dict[int, float], dict[int, np.ndarray]]:
    """By ranks, the median over runs of what a window shows, and its draws."""
    values = {n: [[of_window(w, run) for w in run.windows] for run in group] for n, group in runs.items()}
    return {n: median_of_runs(each) for n, each in values.items()}, {n: draw_medians(v, n) for n, v in values.items()}


def _with_phases(runs: Mapping[int, Sequence[Outcome]]) -> dict[int, list[Outcome]]:
    """The runs whose windows all have shares."""
    kept = {n: [run for run in group if all(w.shares for w in run.windows)] for n, group in runs.items()}
    return {n: group for n, group in kept.items() if group and all("global_batch" in run.plan for run in group)}


def _communication_seconds(window: Window, run: Outcome) -> float:
    return window.shares[StepPart.COMMUNICATION] * run.plan["global_batch"] / window.samples_per_second
