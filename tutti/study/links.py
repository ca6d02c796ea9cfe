"""Compares the exposed communication of a scaling study with an all-reduce of the gradients over measured links.

Light: imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti import units
from tutti.bench.collectives.model import Model, read_models
from tutti.bench.collectives.results import FILE, read_conditions
from tutti.config.schema import MOST_DIRECT_BYTES
from tutti.errors import ConfigError, FolderError
from tutti.runs.step_parts import StepPart
from tutti.study.efficiency import Estimate, ScalePoint, Scaling
from tutti.study.outcome import PointOutcome

NEAR = 0.15  # relative difference up to which exposed communication and an all-reduce are the same
_ELSEWHERE = "Run `tutti bench collectives --operations all_reduce` where the ranks of the study were"


@dataclass(frozen=True)
class AllReduceComparison:
    """The time of an all-reduce of the gradients by the model of links, and the exposed time that was measured."""

    ranks: int
    gradient_bytes: int
    seconds: float  # of one all-reduce, by the model of `tutti bench collectives`
    is_measured: bool  # whether collectives were measured on this number of ranks
    exposed: Estimate  # seconds per step

    @property
    def ratio(self) -> Estimate:
        """Exposed time over the time of the all-reduce."""
        return Estimate(*(each / self.seconds for each in (self.exposed.value, self.exposed.low, self.exposed.high)))

    @property
    def size(self) -> str:
        return units.size(self.gradient_bytes)


@dataclass(frozen=True)
class Links:
    """A measurement of collectives, compared with the points of a study."""

    source: str
    comparisons: tuple[AllReduceComparison, ...]  # by ranks

    def at(self, ranks: int) -> AllReduceComparison | None:
        return next((each for each in self.comparisons if each.ranks == ranks), None)


def match_links(given: Path, scaling: Scaling, outcomes: Sequence[PointOutcome]) -> Links:
    """Compares a measurement of collectives with a study; raises ConfigError if it applies to none of its points."""
    model, conditions = read_all_reduce(given)
    comparisons, reasons = [], []
    for point in scaling.points:
        if point.ranks == 1:
            continue
        run = next(each for each in outcomes if each.is_finished and each.windows and each.point.ranks == point.ranks)
        if reason := _why_not(model, conditions, point, run):
            reasons.append(f"{point.ranks} ranks: {reason}")
        else:
            comparisons.append(_compare(model, point, run))
    if reasons and not comparisons:
        raise ConfigError(f"--collectives {given} does not apply to this study. On {'; on '.join(reasons)}.")
    return Links(str(given), tuple(comparisons))


def conclude_links(links: Links) -> list[str]:
    """States whether an all-reduce explains the exposed communication on the largest number of ranks."""
    if not links.comparisons:
        return []
    last = links.comparisons[-1]
    by = "by the measured links" if last.is_measured else "by the links, measured on other numbers of ranks"
    whole = f"An all-reduce of {last.size} on {last.ranks} ranks takes {units.duration(last.seconds)} {by}"
    exposed, ratio = units.duration(last.exposed.value), last.ratio
    if ratio.is_above(1 + NEAR):
        return [f"{whole}; {exposed} per step are exposed, {ratio.value:.2f} times as long: links do not explain it."]
    if ratio.is_below(1 - NEAR):
        part = units.percent(ratio.value)
        return [f"{whole}; {exposed} per step are exposed, {part} of it: the rest is hidden behind compute."]
    if abs(ratio.value - 1) <= NEAR:
        part = units.percent(ratio.value)
        return [f"{whole}; {exposed} per step are exposed, {part} of it: almost nothing is hidden behind compute."]
    ends = f"{units.duration(last.exposed.low)} to {units.duration(last.exposed.high)}"
    return [f"{whole}; {ends} per step are exposed: the interval is too wide to tell how much is hidden."]


def read_all_reduce(given: Path) -> tuple[Model, Mapping[str, Any]]:
    """Reads the model of all-reduce and the conditions of its measurement."""
    path = given / FILE if given.is_dir() else given
    try:
        models, conditions = read_models(path), read_conditions(path)
    except (OSError, ValueError) as error:
        raise FolderError(
            f"--collectives {given}: {path} is not a measurement of collectives ({error}): expected a run folder of "
            f"`tutti bench collectives`, or the {FILE} in it."
        ) from error
    if "all_reduce" not in models:
        known = ", ".join(models) or "nothing"
        raise FolderError(f"--collectives {given} has a model of {known}, and none of all_reduce. {_ELSEWHERE}.")
    return models["all_reduce"], conditions


def _why_not(model: Model, conditions: Mapping[str, Any], point: ScalePoint, run: PointOutcome) -> str | None:
    """Returns why a measurement does not apply to a point; None if it does."""
    size, hosts = run.plan.get("gradient_bytes"), len(set(run.conditions.get("hosts", ())))
    on_cpu = run.conditions.get("device") == "cpu"
    if not size:
        return "the record does not contain the size of the gradients. Run the study again"
    if point.seconds(StepPart.COMMUNICATION) is None:
        return "the time of communication was not recorded. Run the study with log.phases=true"
    device = conditions.get("device", "cpu")
    if on_cpu != (device == "cpu"):
        return f"collectives were measured on {device}, and the study ran on another device. {_ELSEWHERE}"
    if not any(each.across_hosts == (hosts > 1) for each in model.regimes):
        measured = "one host" if hosts > 1 else "several hosts"
        return f"collectives were measured on ranks of {measured}, and these are on {hosts}. {_ELSEWHERE}"
    if on_cpu and hosts == 1 and point.ranks * size <= MOST_DIRECT_BYTES:
        return "gradients as small as these are averaged in shared memory, without a collective"
    return None


def _compare(model: Model, point: ScalePoint, run: PointOutcome) -> AllReduceComparison:
    across = len(set(run.conditions["hosts"])) > 1
    size, exposed = run.plan["gradient_bytes"], point.seconds(StepPart.COMMUNICATION)
    assert exposed is not None
    is_measured = point.ranks in model.regime(point.ranks, across).measured_ranks
    return AllReduceComparison(point.ranks, size, model.seconds(point.ranks, size, across), is_measured, exposed)
