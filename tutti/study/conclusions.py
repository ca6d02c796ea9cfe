"""The conclusions of a scaling study as sentences, each by a rule, and the comparison of two studies."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from tutti import units
from tutti.runs.step_parts import StepPart
from tutti.study.analysis import Analysis
from tutti.study.differences import difference
from tutti.study.efficiency import ScalePoint, Scaling
from tutti.study.links import conclude_links
from tutti.study.rates import conclude_rates
from tutti.study.sweep_results import ALL, conclude_sweep, describe, find_series
from tutti.units import count, duration, is_lower_better, percent


def compare_studies(analysis: Analysis, other: Analysis) -> list[str]:
    """States how a study differs from another of the same kind."""
    if analysis.definition.kind != other.definition.kind:
        return ["The two studies are of different kinds: nothing is compared."]
    if analysis.scaling and other.scaling:
        return _compare_scaling(analysis.scaling, other.scaling)
    return _compare_metrics(analysis, other)


def _compare_scaling(this: Scaling, other: Scaling) -> list[str]:
    """Compares efficiency on the largest number of ranks that both studies have."""
    common = [point.ranks for point in this.points[1:] if point.ranks in {each.ranks for each in other.points[1:]}]
    if not common:
        return ["The two studies have no number of ranks in common beyond the smallest: nothing is compared."]
    mine, theirs = this.at(common[-1]), other.at(common[-1])
    assert mine is not None and theirs is not None
    first, second = theirs, mine
    change = "From the other study to this one"
    if mine.per_rank_batch and theirs.per_rank_batch and mine.per_rank_batch != theirs.per_rank_batch:
        first, second = sorted((mine, theirs), key=lambda point: point.per_rank_batch or 0)
        change = f"From {count(first.per_rank_batch or 0)} to {count(second.per_rank_batch or 0)} samples per rank"
    return [f"{change} {_efficiency_change(first, second)}."]


def _efficiency_change(first: ScalePoint, second: ScalePoint) -> str:
    before, after = first.efficiency, second.efficiency
    if not (after.is_above(before) or after.is_below(before)):
        return (
            f"efficiency at {first.ranks} ranks does not change beyond the intervals "
            f"({percent(before.value)} and {percent(after.value)})"
        )
    moves = "rises" if after.value > before.value else "falls"
    words = f"efficiency at {first.ranks} ranks {moves} from {percent(before.value)} to {percent(after.value)}"
    shares = [point.share_estimates.get(StepPart.COMMUNICATION) for point in (first, second)]
    if shares[0] and shares[1] and (shares[0].is_above(shares[1]) or shares[0].is_below(shares[1])):
        moves = "falls" if shares[1].value < shares[0].value else "rises"
        ends = f"from {percent(shares[0].value)} to {percent(shares[1].value)}"
        words += f", and exposed communication {moves} {ends} of the step"
    return words


def _compare_metrics(analysis: Analysis, other: Analysis) -> list[str]:
    """Compares the settings of both studies that differ beyond the spread of seeds."""
    metric = analysis.metric
    if metric is None:
        return []
    theirs = {(setting.ranks, str(dict(setting.values))): setting for setting in other.settings}
    common = [(s, theirs[key]) for s in analysis.settings if (key := (s.ranks, str(dict(s.values)))) in theirs]
    pairs = [pair for pair in common if all(each.finals(metric) for each in pair)]
    if not pairs:
        return [f"The two studies have no setting in common with a {units.metric_title(metric)}: nothing is compared."]
    found = []
    for mine, its in pairs:
        here, there = mine.finals(metric), its.finals(metric)
        if way := difference(metric, here, there, len(pairs)):
            how = "better" if (way < 0) == is_lower_better(metric) else "worse"
            numbers = f"{units.metric(metric, fmean(here))} against {units.metric(metric, fmean(there))}"
            found.append(
                f"{units.metric_title(metric).capitalize()} is {how} here with {describe(mine.values)}: {numbers}."
            )
    return found or [
        f"None of the {len(pairs)} settings in both studies differs in {units.metric_title(metric)} beyond the spread "
        "of seeds."
    ]


GOOD = 0.8  # efficiency
_LEAST_LOSS = 0.05  # of a step: smaller losses are not explained
_NARROW = 0.2  # largest width of an interval that is reported
_GOOD_FIT = 0.1  # largest residual of a fit that is reported


def conclude(analysis: Analysis, other: Analysis | None = None, ahead: Sequence[str] = ()) -> list[str]:
    """Returns the conclusions of a study, what is said about more ranks (`ahead`), and how it differs from another."""
    sentences = conclude_scaling(analysis.scaling) if analysis.scaling else []
    sentences += _shared_cores(analysis) if analysis.scaling else []
    sentences += conclude_links(analysis.links) if analysis.links else []
    sentences += ahead
    if analysis.definition.goal.kind == "rate":
        sentences += _rates(analysis)
    elif analysis.definition.kind == "sweep":
        sentences += conclude_sweep(analysis)
    else:
        sentences += _solution(analysis)
    if other is not None:
        sentences += compare_studies(analysis, other)
    return sentences + _exceptions(analysis)


def _rates(analysis: Analysis) -> list[str]:
    """States the recommended learning rate of each curve, with the name of the curve if there are several."""
    found = []
    for series in find_series(analysis):
        sentences = conclude_rates(analysis, series.settings)
        found += sentences if series.name == ALL else [f"{series.name}: {sentence}" for sentence in sentences]
    return found


def conclude_scaling(scaling: Scaling) -> list[str]:
    """States the efficiency, what reduces it, the speed-up, and the fitted laws."""
    if len(scaling.points) == 1:
        return [
            f"Runs finished only on {count(scaling.points[0].ranks, 'rank')}: efficiency needs two numbers of ranks."
        ]
    found = [_efficiency(scaling), _loss(scaling), _speedup(scaling), _serial(scaling)]
    return [sentence for sentence in found if sentence]


def _efficiency(scaling: Scaling) -> str:
    """States up to how many ranks efficiency is above GOOD, and the efficiency beyond."""
    base, *more = scaling.points
    held = [base]
    for point in more:
        if not point.efficiency.is_above(GOOD):
            break
        held.append(point)
    rest = more[len(held) - 1 :]
    if not rest:
        last = more[-1]
        return (
            f"Efficiency stays above {percent(GOOD)} up to {last.ranks} ranks, the most that were measured: "
            f"{last.efficiency.percent()} there."
        )
    holds = f"Efficiency stays above {percent(GOOD)} up to {count(held[-1].ranks, 'rank')}; " if len(held) > 1 else ""
    if not rest[0].efficiency.is_below(GOOD):
        where = "at" if holds else "At"
        close = f"{where} {rest[0].ranks} {'it' if holds else 'ranks efficiency'} is {rest[0].efficiency.percent()}"
        beyond = ""
        if rest[-1].efficiency.is_below(GOOD):
            beyond = f"; at {rest[-1].ranks} it is {rest[-1].efficiency.percent()}{_exposed(rest[-1], base)}"
        return f"{holds}{close}, too close to {percent(GOOD)} to tell{beyond}."
    last = rest[-1]
    if holds:
        return f"{holds}beyond, it falls to {last.efficiency.percent()} at {last.ranks}{_exposed(last, base)}."
    return (
        f"Efficiency is below {percent(GOOD)} from {rest[0].ranks} ranks on: "
        f"{last.efficiency.percent()} at {last.ranks}{_exposed(last, base)}."
    )


def _exposed(point: ScalePoint, base: ScalePoint) -> str:
    """States the share of exposed communication if it is larger than on the smallest number of ranks."""
    mine, before = (each.share_estimates.get(StepPart.COMMUNICATION) for each in (point, base))
    if mine is None or before is None or not mine.is_above(before):
        return ""
    return f", where exposed communication takes {percent(mine.value)} of the step"


def _loss(scaling: Scaling) -> str | None:
    """States which part of a step causes most of the loss on the largest number of ranks."""
    base, last = scaling.points[0], scaling.points[-1]
    if not last.efficiency.is_below(1 - _LEAST_LOSS) or not (base.shares and last.shares):
        return None
    if not (base.step_seconds and last.step_seconds and base.per_rank_batch and last.per_rank_batch):
        return None
    work = last.per_rank_batch / base.per_rank_batch
    lost = last.step_seconds - base.step_seconds * work
    parts = {
        part: last.shares[part] * last.step_seconds - base.shares[part] * base.step_seconds * work
        for part in base.shares
    }
    largest = max(parts, key=lambda part: parts[part])
    now, before = last.seconds(largest), base.seconds(largest)
    if now is None or before is None or now.low <= work * before.high or parts[largest] < lost / 2:
        return None
    of_it = "all" if parts[largest] > 0.995 * lost else percent(parts[largest] / lost)
    return (
        f"A step on {last.ranks} ranks takes {duration(last.step_seconds)}, {duration(lost)} more than with "
        f"{'perfect' if base.ranks == 1 else 'the same'} efficiency; {of_it} of that is {largest}."
    )


def _speedup(scaling: Scaling) -> str:
    base, last = scaling.points[0], scaling.points[-1]
    if last.speedup.is_below(1.0):
        return f"{last.ranks} ranks are slower than {base.ranks}: {last.speedup.times()} the samples/s."
    if not last.speedup.is_above(1.0):
        pair = f"{last.ranks} ranks are faster than {base.ranks}"
        return f"The runs do not show whether {pair}: {last.speedup.times()} the samples/s."
    return f"{last.ranks} ranks have {last.speedup.times()} the samples/s of {base.ranks}."


def _serial(scaling: Scaling) -> str | None:
    serial = scaling.serial
    if serial is None or serial.residual > _GOOD_FIT or len(scaling.points) < 3:
        return None
    if serial.fraction.high - serial.fraction.low > _NARROW or serial.fraction.value > 1:
        return None  # the fit is imprecise, or the law does not apply: more ranks are slower
    if not serial.fraction.is_above(0.0):
        most = percent(max(serial.fraction.high, 0), 1)
        return f"By {serial.law}'s law the serial fraction cannot be distinguished from 0: it is at most {most}."
    limit = ""
    if serial.law == "Amdahl":
        limit = f", which no number of ranks makes more than {1 / serial.fraction.value:.3g} times as fast as one"
    return f"By {serial.law}'s law {serial.fraction.percent(1)} of the work is serial{limit}."


def _shared_cores(analysis: Analysis) -> list[str]:
    """States from how many ranks on there are more ranks than cores, which limits what a scaling study shows."""
    for run in analysis.runs:  # by ranks
        facts = run.outcome.conditions
        on_host = max(Counter(facts.get("hosts") or ()).values(), default=0)
        cores = facts.get("hardware", {}).get("cores") or math.inf
        if run.outcome.is_finished and facts.get("device") == "cpu" and on_host > cores:
            ranks, most = run.outcome.point.ranks, analysis.runs[-1].outcome.point.ranks
            where = f"On {count(ranks, 'rank')}" if ranks == most else f"From {count(ranks, 'rank')} on"
            return [
                f"{where}, ranks share cores ({on_host} ranks on the {cores} cores of a host), which lowers efficiency."
            ]
    return []


def _solution(analysis: Analysis) -> list[str]:
    """States the time to the goal on the smallest and on the fastest number of ranks."""
    goal = analysis.definition.goal
    known = [(setting, found) for setting in analysis.settings if (found := setting.seconds_to_goal())]
    if len(known) < 2:
        return []
    (first, slow), (best, fast) = known[0], min(known, key=lambda each: each[1].median)
    if fast.high >= slow.low:
        return []
    to = "finish training"
    if goal.metric and goal.target is not None:
        to = f"reach a {units.metric_title(goal.metric)} of {units.metric(goal.metric, goal.target)}"
    ratio = slow.median / fast.median
    once = " (one run each)" if slow.n == fast.n == 1 else ""
    return [
        f"To {to}, {count(best.ranks, 'rank')} take{'s' if best.ranks == 1 else ''} {duration(fast.median)} and "
        f"{count(first.ranks, 'rank')} {duration(slow.median)}: {ratio:.2f} times as fast{once}."
    ]


def _exceptions(analysis: Analysis) -> list[str]:
    """States which points failed or have not run, and which are outliers."""
    runs = analysis.runs
    failed = [run for run in runs if run.outcome.state.state == "failed"]
    missing = [run for run in runs if run.outcome.state.state in ("waiting", "running", "submitted")]
    outliers = [run.id for run in runs if run.is_outlier]
    at_once = analysis.definition.at_once
    windows = sum(len(run.outlier_windows) for run in runs) if at_once == 1 else 0
    found = []
    if at_once > 1:
        found.append(f"{at_once} points ran at once: a single run would be faster than these times and speeds.")
    if failed:
        found.append(
            f"{len(failed)} of {len(runs)} points failed: {', '.join(run.id for run in failed[:6])}{_more(failed)}."
        )
    if missing:
        found.append(f"{len(missing)} of {len(runs)} points ha{'s' if len(missing) == 1 else 've'} not finished yet.")
    if outliers:
        found.append(f"Outliers among repeats, marked and kept: {', '.join(outliers[:6])}{_more(outliers)}.")
    if windows:
        among = sum(run.speed.n for run in runs if run.speed)
        found.append(f"{count(windows)} of {count(among)} log windows are outliers in their run; they are kept.")
    return found


def _more(found: list) -> str:
    return f" and {len(found) - 6} more" if len(found) > 6 else ""


def _ranks(number: int) -> str:
    return count(number, "rank")
