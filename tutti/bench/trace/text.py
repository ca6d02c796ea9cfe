"""The summary of a profile as text, over all ranks and for each."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from tutti import units
from tutti.bench.trace.summary import PARTS, CallTotal, RankSummary, arrivals
from tutti.runs.step_parts import StepPart

_MOST_ROWS = 12
_MOST_GAPS = 6
_WIDEST_NAME = 64


def write_summary(title: str, summaries: Sequence[RankSummary], offsets: Sequence[int]) -> str:
    """The text of a summary, with times in milliseconds per step."""
    on_gpu = any(summary.on_gpu for summary in summaries)
    sections = [
        [title, f"All times are milliseconds a step, over {len(summaries[0].steps)} step(s)."],
        _times(summaries),
        _communication(summaries, offsets),
        _calls("Operators by self time", summaries, lambda one: one.operators),
        _calls("Kernels and copies on the GPU", summaries, lambda one: one.kernels) if on_gpu else [],
        _gaps(summaries, on_gpu),
        _calls("Synchronizations, in which the host waits", summaries, lambda one: one.waits)
        or ["Synchronizations: none."],
        _memory(summaries),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _times(summaries: Sequence[RankSummary]) -> list[str]:
    """Step times, the parts of a step on the host, compute, communication and idle time; one row for each rank."""
    parts = [part for part in PARTS if any(summary.parts[part] for summary in summaries)]
    named = ["step function" if part is StepPart.COMPUTE else part for part in parts]
    titles = ["rank", "step", *named, "compute", "communication", "exposed", "idle"]

    def figures(summary: RankSummary) -> list[float]:
        values = [summary.window, *(summary.parts[part] for part in parts)]
        values += [summary.compute, summary.communication, summary.exposed, summary.idle]
        return [_per_step(value, summary) for value in values]

    found = [figures(summary) for summary in summaries]
    rows = [[f"{s.rank} on {s.host}", *map(_show, values)] for s, values in zip(summaries, found, strict=True)]
    if len(summaries) > 1:
        rows.append(["mean", *(_show(statistics.fmean(column)) for column in zip(*found, strict=True))])
    slowest = max(((steps, number) for s in summaries for number, steps in s.steps.items()), default=(0, 0))
    return [*units.table(titles, rows), f"longest step: {slowest[1]:,}, {slowest[0] / 1e6:.2f} ms on the host"]


def _communication(summaries: Sequence[RankSummary], offsets: Sequence[int]) -> list[str]:
    if not any(summary.collectives for summary in summaries):
        return ["Communication: none was traced."]
    whole, exposed = (
        statistics.fmean(_per_step(value(summary), summary) for summary in summaries)
        for value in (lambda one: one.communication, lambda one: one.exposed)
    )
    step = statistics.fmean(_per_step(summary.window, summary) for summary in summaries)
    lines = [
        f"Communication: {_show(whole)}, of which {_show(whole - exposed)} are hidden behind compute and "
        f"{_show(exposed)} exposed ({units.percent(exposed / step, 1)} of a step)."
    ]
    if came := arrivals(summaries, offsets):
        last = Counter(max(range(len(times)), key=lambda rank: times[rank]) for times in came)
        rank, times = last.most_common(1)[0]
        waited = statistics.median(max(times) - min(times) for times in came) / 1e6
        lines.append(
            f"Rank {rank} on {summaries[rank].host} was the last to begin {times} of {len(came)} collectives; "
            f"from the first rank to the last it took {_show(waited)} ms at the median."
        )
    return lines


def _calls(
    title: str, summaries: Sequence[RankSummary], rows_of: Callable[[RankSummary], list[CallTotal]]
) -> list[str]:
    """Names with their calls and times per step: the mean over ranks, and the rank with the most."""
    calls: dict[str, list[float]] = defaultdict(list)
    times: dict[str, dict[int, float]] = defaultdict(dict)
    for summary in summaries:
        for row in rows_of(summary):
            calls[row.name].append(row.calls / len(summary.steps))
            times[row.name][summary.rank] = _per_step(row.nanoseconds, summary)
    if not times:
        return []
    count = len(summaries)
    step = statistics.fmean(_per_step(summary.window, summary) for summary in summaries)
    rows = []
    for name, of_rank in sorted(times.items(), key=lambda item: -sum(item[1].values()))[:_MOST_ROWS]:
        mean = sum(of_rank.values()) / count
        most = max(of_rank, key=lambda rank: of_rank[rank])
        row = [_short(name), f"{sum(calls[name]) / count:,.1f}", _show(mean), f"{units.percent(mean / step, 1)}"]
        rows.append([*row, f"{_show(of_rank[most])} on {most}"] if count > 1 else row)
    titles = [title, "calls", "ms", "of the step"]
    return units.table([*titles, "most on a rank"] if count > 1 else titles, rows)


def _gaps(summaries: Sequence[RankSummary], on_gpu: bool) -> list[str]:
    idle = statistics.fmean(_per_step(summary.idle, summary) for summary in summaries)
    what = "the GPU runs no kernel" if on_gpu else "no operator runs"
    found = sorted(((gap, summary) for summary in summaries for gap in summary.gaps), key=lambda p: -p[0].nanoseconds)
    rows = [
        [f"step {gap.step:,}, {gap.part}", str(summary.rank), _show(gap.nanoseconds / 1e6), _short(gap.meanwhile)]
        for gap, summary in found[:_MOST_GAPS]
    ]
    titles = ["longest gaps", "rank", "ms", "the host was in"]
    return [f"Idle time, in which {what}: {_show(idle)}.", *units.table(titles, rows, left=(titles[0], titles[3]))]


def _memory(summaries: Sequence[RankSummary]) -> list[str]:
    rows = [
        [
            f"{summary.rank}: {one.device}",
            f"{one.peak / 1e6:,.1f}",
            f"{one.allocations / len(summary.steps):,.0f}",
            f"{one.allocated / 1e6 / len(summary.steps):,.1f}",
        ]
        for summary in summaries
        for one in summary.memory
    ]
    return units.table(["Memory of rank", "peak MB", "allocations", "MB allocated"], rows) if rows else []


def _per_step(nanoseconds: float, summary: RankSummary) -> float:
    """Milliseconds per step."""
    return nanoseconds / 1e6 / len(summary.steps)


def _show(milliseconds: float) -> str:
    return f"{milliseconds:,.2f}" if milliseconds < 100 else f"{milliseconds:,.1f}"


def _short(name: str) -> str:
    return name if len(name) <= _WIDEST_NAME else name[: _WIDEST_NAME - 3] + "..."
