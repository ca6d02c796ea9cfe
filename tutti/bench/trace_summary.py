"""Where the time of traced steps went on one rank: operators, gaps, communication, synchronisations, memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tutti.bench.trace_communication import Collective, find_collectives, find_computing
from tutti.bench.trace_gaps import PARTS, Gap, longest_gaps
from tutti.bench.trace_intervals import by_track, innermost, intersect, subtract, total, union
from tutti.bench.traces import Span, Trace, Track

_WAITS = {
    "aten::_local_scalar_dense": ".item()",
    "cudaStreamSynchronize": "cudaStreamSynchronize",
    "cudaDeviceSynchronize": "cudaDeviceSynchronize",
    "cudaEventSynchronize": "cudaEventSynchronize",
    "cudaMemcpy": "cudaMemcpy",
}


@dataclass(frozen=True)
class Row:
    """Calls of one name, and the nanoseconds that were theirs."""

    name: str
    calls: int
    nanoseconds: int


@dataclass(frozen=True)
class Memory:
    """What was allocated on one device while its steps were traced, in bytes."""

    device: str
    peak: int
    allocations: int
    allocated: int


@dataclass(frozen=True)
class RankSummary:
    """One rank's steps; all times in nanoseconds and over all traced steps."""

    rank: int
    host: str
    on_gpu: bool
    steps: dict[int, int]  # how long the host was in each
    window: int  # from the first step's begin to the end of all work
    parts: dict[str, int]
    computing: int
    communication: int
    exposed: int  # communication beside which nothing was computed
    idle: int  # neither computing nor communication
    collectives: list[Collective]  # on the clock of the rank's host
    operators: list[Row]  # by their own time, without what they call
    kernels: list[Row]
    waits: list[Row]
    gaps: list[Gap]
    memory: list[Memory] = field(default_factory=list)

    @property
    def hidden(self) -> int:
        return self.communication - self.exposed


def summarise(trace: Trace, rank: int, host: str) -> RankSummary:
    """Everything about the steps that a trace holds; what is outside of them does not count."""
    spans = list(trace.spans())
    steps = {span.step: span for span in spans if span.step is not None and span.is_on_host}
    begin = min(span.begin for span in steps.values())
    end = max(span.end for span in steps.values())
    end = max([end, *(span.end for span in spans if span.is_work_of_gpu)])
    spans = [span for span in spans if begin <= span.begin < end]
    on_gpu = any(span.is_work_of_gpu for span in spans)
    collectives = find_collectives(spans, on_gpu)
    talking = intersect(union(when for _, when in collectives), [(begin, end)])
    busy = intersect(find_computing(spans, on_gpu), [(begin, end)])
    idle = subtract(subtract([(begin, end)], busy), talking)
    held = {track: list(innermost(those)) for track, those in by_track(s for s in spans if _is_told(s)).items()}
    return RankSummary(
        rank=rank,
        host=host,
        on_gpu=on_gpu,
        steps={number: span.end - span.begin for number, span in sorted(steps.items())},
        window=end - begin,
        parts=_parts(spans),
        computing=total(busy),
        communication=total(talking),
        exposed=total(subtract(talking, busy)),
        idle=total(idle),
        collectives=collectives,
        operators=_operators(spans, held),
        kernels=_rows((span.name, span.end - span.begin) for span in spans if span.is_work_of_gpu),
        waits=_rows((_WAITS[span.name], span.end - span.begin) for span in spans if span.name in _WAITS),
        gaps=longest_gaps(idle, spans, steps),
        memory=_memory(trace, begin, end),
    )


def _is_told(span: Span) -> bool:
    """What the host does, in words of operators and ranges: lines of code are too fine."""
    return span.is_on_host and span.kind not in ("python_function", "overhead")


def _parts(spans: Iterable[Span]) -> dict[str, int]:
    sums: dict[str, int] = dict.fromkeys(PARTS, 0)
    for span in spans:
        if span.kind == "user_annotation" and span.name in sums:
            sums[span.name] += span.end - span.begin
    return sums


Held = dict[Track, list[tuple[int, int, Span]]]


def _operators(spans: Iterable[Span], held: Held) -> list[Row]:
    """Operators and calls of the GPU's runtime by the time in which they, and nothing that they call, ran."""
    calls: dict[str, int] = defaultdict(int)
    for span in spans:
        calls[span.name] += span.is_on_host
    own: dict[str, int] = defaultdict(int)
    for pieces in held.values():
        for begin, end, span in pieces:
            if span.kind in ("cpu_op", "cuda_runtime", "cuda_driver"):
                own[span.name] += end - begin
    rows = [Row(name, calls[name], nanoseconds) for name, nanoseconds in own.items()]
    return sorted(rows, key=lambda row: -row.nanoseconds)


def _rows(times: Iterable[tuple[str, int]]) -> list[Row]:
    """Sums by name, the longest first."""
    sums: dict[str, list[int]] = defaultdict(list)
    for name, nanoseconds in times:
        sums[name].append(nanoseconds)
    rows = [Row(name, len(found), sum(found)) for name, found in sums.items()]
    return sorted(rows, key=lambda row: -row.nanoseconds)


def _memory(trace: Trace, begin: int, end: int) -> list[Memory]:
    found: dict[int, list[dict[str, int]]] = defaultdict(list)
    for event in trace.events:
        if event["name"] == "[memory]" and begin <= event["ts"] < end:
            found[event["args"]["Device Id"]].append(event["args"])
    return [
        Memory(
            device="CPU" if device < 0 else f"GPU {device}",
            peak=max(one["Total Allocated"] for one in events),
            allocations=sum(one["Bytes"] > 0 for one in events),
            allocated=sum(max(0, one["Bytes"]) for one in events),
        )
        for device, events in sorted(found.items())
    ]


def arrivals(summaries: Sequence[RankSummary], offsets: Sequence[int]) -> list[list[int]]:
    """When each rank began each collective, in nanoseconds on rank 0's clock; none where ranks differ in them."""
    kinds = {tuple(name for name, _ in summary.collectives) for summary in summaries}
    if len(kinds) != 1 or len(summaries) < 2:
        return []
    begins = [
        [when[0] - offset for _, when in summary.collectives]
        for summary, offset in zip(summaries, offsets, strict=True)
    ]
    return [list(those) for those in zip(*begins, strict=True)]
