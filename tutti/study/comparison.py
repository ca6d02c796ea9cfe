"""Two studies side by side in plain sentences: where one scales or learns better than the other beyond the intervals.

Light: imports no torch.
"""

from tutti.study.analysis import Analysis
from tutti.study.efficiency import ScalePoint, Scaling
from tutti.study.numbers import count, metric_number, metric_words, percent
from tutti.study.series import describe
from tutti.study.sweep_conclusions import is_better


def compare_studies(analysis: Analysis, other: Analysis) -> list[str]:
    """How a study differs from another of the same kind."""
    if analysis.definition.kind != other.definition.kind:
        return ["The two studies are of different kinds: nothing is compared."]
    if analysis.scaling and other.scaling:
        return _compare_scaling(analysis.scaling, other.scaling)
    return _compare_metrics(analysis, other)


def _compare_scaling(this: Scaling, other: Scaling) -> list[str]:
    """Efficiency on the largest number of ranks that both have beyond their smallest."""
    common = [point.ranks for point in this.points[1:] if point.ranks in {each.ranks for each in other.points[1:]}]
    if not common:
        return ["The two studies have no number of ranks in common beyond the smallest: nothing is compared."]
    mine, theirs = this.at(common[-1]), other.at(common[-1])
    assert mine is not None and theirs is not None
    first, second = theirs, mine
    change = "From the other study to this one"
    if mine.per_rank_batch and theirs.per_rank_batch and mine.per_rank_batch != theirs.per_rank_batch:
        first, second = sorted((mine, theirs), key=lambda point: point.per_rank_batch or 0)
        change = f"From {count(first.per_rank_batch or 0)} to {count(second.per_rank_batch or 0)} samples a rank"
    return [f"{change} {_efficiency_moves(first, second)}."]


def _efficiency_moves(first: ScalePoint, second: ScalePoint) -> str:
    before, after = first.efficiency, second.efficiency
    if not (after.is_above(before) or after.is_below(before)):
        return (
            f"efficiency at {first.ranks} ranks does not change beyond the intervals "
            f"({percent(before.value)} and {percent(after.value)})"
        )
    moves = "rises" if after.value > before.value else "falls"
    words = f"efficiency at {first.ranks} ranks {moves} from {percent(before.value)} to {percent(after.value)}"
    shares = [point.share_estimates.get("communication") for point in (first, second)]
    if shares[0] and shares[1] and (shares[0].is_above(shares[1]) or shares[0].is_below(shares[1])):
        moves = "falls" if shares[1].value < shares[0].value else "rises"
        ends = f"from {percent(shares[0].value)} to {percent(shares[1].value)}"
        words += f", and exposed communication {moves} {ends} of the step"
    return words


def _compare_metrics(analysis: Analysis, other: Analysis) -> list[str]:
    """Settings of both studies whose runs all end better in one of them."""
    metric = analysis.metric
    if metric is None:
        return []
    theirs = {(setting.ranks, str(dict(setting.values))): setting for setting in other.settings}
    pairs = [(s, theirs[key]) for s in analysis.settings if (key := (s.ranks, str(dict(s.values)))) in theirs]
    found = []
    for mine, its in pairs:
        here, there = mine.final(metric), its.final(metric)
        if here and there and (is_better(metric, here, there) or is_better(metric, there, here)):
            how = "better" if is_better(metric, here, there) else "worse"
            numbers = f"{metric_number(metric, here.mean)} against {metric_number(metric, there.mean)}"
            found.append(f"{metric_words(metric).capitalize()} is {how} here with {describe(mine.values)}: {numbers}.")
    return found or [
        f"Of {len(pairs)} settings in both studies none differs in {metric_words(metric)} beyond the range of runs."
    ]
