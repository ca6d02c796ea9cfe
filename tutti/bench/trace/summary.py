"""Which steps are traced, and where their time goes on one rank: operators, idle time, communication, memory."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tutti.bench.trace.spans import Interval, Span, Trace, Track, by_track, innermost, intersect, subtract, total, union
from tutti.errors import ConfigError
from tutti.runs.step_parts import StepPart

DEFAULT_STEPS = "20:25"


@dataclass(frozen=True)
class TracedSteps:
    """The steps to trace, counted from 1, the last one included; with memory or Python stacks on request."""

    first: int
    last: int
    memory: bool = False
    stacks: bool = False

    def check_end(self, total_steps: int) -> None:
        """Refuse steps after the end of the recipe."""
        if self.last > total_steps:
            raise ConfigError(
                f"--steps {self.first}:{self.last}: the recipe ends with step {total_steps:,}. "
                f"Give a last step of at most {total_steps}, or set more epochs."
            )


def parse_steps(text: str) -> tuple[int, int]:
    """FIRST:LAST, counted from 1, as two numbers."""
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if found is None:
        raise ConfigError(f"--steps {text}: expected FIRST:LAST, two numbers of steps. Try --steps {DEFAULT_STEPS}.")
    first, last = int(found.group(1)), int(found.group(2))
    if first < 1:
        raise ConfigError(f"--steps {text}: steps are counted from 1. Try --steps 1:{max(1, last)}.")
    if first > last:
        raise ConfigError(f"--steps {text}: the first step comes after the last. Try --steps {last}:{first}.")
    return first, last


DIRECT = "memory:all_reduce"  # gradients averaged through shared memory, not through Gloo
Collective = tuple[str, Interval]

_QUEUED = ("gloo:", "mpi:", "ucc:")  # executed by another thread than the calling one


def is_communication(span: Span) -> bool:
    """Returns whether a span transfers data between ranks: an operation of the host, or a kernel of NCCL."""
    if span.kind == "kernel":
        return span.name.lower().startswith("nccl")
    return span.is_on_host and span.name.startswith((*_QUEUED, DIRECT))


def find_collectives(spans: Sequence[Span], on_gpu: bool) -> list[Collective]:
    """Every collective, in the order of time: from its submission, not only from its start.

    In between it waits in a queue. Without GPUs submissions can be matched; with GPUs they are mixed with NCCL's.
    """
    found = sorted((span for span in spans if is_communication(span)), key=lambda span: span.begin)
    queued = [span for span in found if span.name.startswith(_QUEUED)]
    asked = [] if on_gpu else sorted((s for s in spans if _submits_collective(s)), key=lambda span: span.begin)
    begins: dict[Span, Span] = dict(zip(queued, asked, strict=True)) if len(queued) == len(asked) else {}
    collectives = []
    for span in found:
        by = begins.get(span, span)
        collectives.append((span.name, (min(span.begin, by.begin), max(span.end, by.end))))
    return sorted(collectives, key=lambda one: one[1])


def find_compute(spans: Sequence[Span], on_gpu: bool) -> list[Interval]:
    """The intervals in which a GPU runs kernels other than communication; on CPUs, in which operators run.

    An operator that communicates before it returns does not compute meanwhile.
    """
    if on_gpu:
        return union((s.begin, s.end) for s in spans if s.is_work_of_gpu and not is_communication(s))
    running: list[Interval] = []
    for those in by_track(spans).values():
        communicating = union(
            (span.begin, span.end) for span in those if is_communication(span) or _submits_collective(span)
        )
        running += subtract(union((span.begin, span.end) for span in those if span.kind == "cpu_op"), communicating)
    return union(running)


def _submits_collective(span: Span) -> bool:
    """Returns whether a span is the operator that submits a collective, and may wait for it."""
    return span.kind == "cpu_op" and span.name.startswith("c10d::")


PARTS = (
    StepPart.DATA,
    StepPart.FORWARD,
    StepPart.BACKWARD,
    StepPart.OPTIMIZER,
    StepPart.COMPUTE,  # of a step of the user's own
    StepPart.LOGGING,
)
_MOST_GAPS = 5


@dataclass(frozen=True)
class Gap:
    """An idle interval, and what the host did meanwhile."""

    step: int
    part: str
    nanoseconds: int
    meanwhile: str


def longest_gaps(idle: Sequence[Interval], spans: Sequence[Span], steps: Mapping[int, Span]) -> list[Gap]:
    """The longest idle intervals, each with its step and part."""
    main = next(iter(steps.values())).track
    host = [span for span in spans if span.track == main and span.is_on_host and span.kind != "overhead"]
    parts = [span for span in host if span.name in PARTS and span.kind == "user_annotation"]
    pieces = list(innermost(host))
    gaps = []
    for begin, end in sorted(idle, key=lambda gap: gap[0] - gap[1])[:_MOST_GAPS]:
        step = next((number for number, span in steps.items() if span.begin <= begin < span.end), max(steps))
        part = max(parts, key=lambda span: _shared(span, begin, end), default=None)
        if part is None or _shared(part, begin, end) <= 0:
            gaps.append(Gap(step, "between its parts", end - begin, _meanwhile(pieces, begin, end)))
            continue
        meanwhile = _meanwhile(pieces, max(begin, part.begin), min(end, part.end))
        gaps.append(Gap(step, part.name, end - begin, meanwhile))
    return gaps


def _meanwhile(pieces: Iterable[tuple[int, int, Span]], begin: int, end: int) -> str:
    """What the main thread did for most of an idle interval; in a range without operators, that is Python code."""
    longest: dict[str, int] = defaultdict(int)
    for left, right, span in pieces:
        if left < end and right > begin:
            is_range = span.kind == "user_annotation"
            longest[f"Python in {span.name}" if is_range else span.name] += min(right, end) - max(left, begin)
    return max(longest, key=lambda name: longest[name], default="nothing that was traced")


def _shared(span: Span, begin: int, end: int) -> int:
    return min(span.end, end) - max(span.begin, begin)


_WAITS = {
    "aten::_local_scalar_dense": ".item()",
    "cudaStreamSynchronize": "cudaStreamSynchronize",
    "cudaDeviceSynchronize": "cudaDeviceSynchronize",
    "cudaEventSynchronize": "cudaEventSynchronize",
    "cudaMemcpy": "cudaMemcpy",
}


@dataclass(frozen=True)
class CallTotal:
    """The calls of one name, and their nanoseconds in all."""

    name: str
    calls: int
    nanoseconds: int


@dataclass(frozen=True)
class Memory:
    """Memory that was allocated on one device during the traced steps, in bytes."""

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
    steps: dict[int, int]  # time of the host in each
    window: int  # from the start of the first step to the end of all work
    parts: dict[str, int]
    compute: int
    communication: int
    exposed: int  # communication that compute does not hide
    idle: int  # neither compute nor communication
    collectives: list[Collective]  # on the clock of the rank's host
    operators: list[CallTotal]  # by their own time, without what they call
    kernels: list[CallTotal]
    waits: list[CallTotal]
    gaps: list[Gap]
    memory: list[Memory] = field(default_factory=list)

    @property
    def hidden(self) -> int:
        return self.communication - self.exposed


def summarise(trace: Trace, rank: int, host: str) -> RankSummary:
    """The summary of the steps in a trace; events outside of them do not count."""
    spans = list(trace.spans())
    steps = {span.step: span for span in spans if span.step is not None and span.is_on_host}
    begin = min(span.begin for span in steps.values())
    end = max(span.end for span in steps.values())
    end = max([end, *(span.end for span in spans if span.is_work_of_gpu)])
    spans = [span for span in spans if begin <= span.begin < end]
    on_gpu = any(span.is_work_of_gpu for span in spans)
    collectives = find_collectives(spans, on_gpu)
    communicating = intersect(union(when for _, when in collectives), [(begin, end)])
    busy = intersect(find_compute(spans, on_gpu), [(begin, end)])
    idle = subtract(subtract([(begin, end)], busy), communicating)
    tracks = by_track(span for span in spans if _is_operator_or_range(span))
    held = {track: list(innermost(those)) for track, those in tracks.items()}
    return RankSummary(
        rank=rank,
        host=host,
        on_gpu=on_gpu,
        steps={number: span.end - span.begin for number, span in sorted(steps.items())},
        window=end - begin,
        parts=_parts(spans),
        compute=total(busy),
        communication=total(communicating),
        exposed=total(subtract(communicating, busy)),
        idle=total(idle),
        collectives=collectives,
        operators=_operators(spans, held),
        kernels=_rows((span.name, span.end - span.begin) for span in spans if span.is_work_of_gpu),
        waits=_rows((_WAITS[span.name], span.end - span.begin) for span in spans if span.name in _WAITS),
        gaps=longest_gaps(idle, spans, steps),
        memory=_memory(trace, begin, end),
    )


def _is_operator_or_range(span: Span) -> bool:
    """Returns whether a span of the host is an operator or a range, not a Python function."""
    return span.is_on_host and span.kind not in ("python_function", "overhead")


def _parts(spans: Iterable[Span]) -> dict[str, int]:
    sums: dict[str, int] = {part.value: 0 for part in PARTS}
    for span in spans:
        if span.kind == "user_annotation" and span.name in sums:
            sums[span.name] += span.end - span.begin
    return sums


Held = dict[Track, list[tuple[int, int, Span]]]


def _operators(spans: Iterable[Span], held: Held) -> list[CallTotal]:
    """Operators and calls of the CUDA runtime by self time."""
    calls: dict[str, int] = defaultdict(int)
    for span in spans:
        calls[span.name] += span.is_on_host
    own: dict[str, int] = defaultdict(int)
    for pieces in held.values():
        for begin, end, span in pieces:
            if span.kind in ("cpu_op", "cuda_runtime", "cuda_driver"):
                own[span.name] += end - begin
    rows = [CallTotal(name, calls[name], nanoseconds) for name, nanoseconds in own.items()]
    return sorted(rows, key=lambda row: -row.nanoseconds)


def _rows(times: Iterable[tuple[str, int]]) -> list[CallTotal]:
    """Totals by name, the largest first."""
    sums: dict[str, list[int]] = defaultdict(list)
    for name, nanoseconds in times:
        sums[name].append(nanoseconds)
    rows = [CallTotal(name, len(found), sum(found)) for name, found in sums.items()]
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
    """When each rank began each collective, in nanoseconds on rank 0's clock; empty if ranks have different ones."""
    kinds = {tuple(name for name, _ in summary.collectives) for summary in summaries}
    if len(kinds) != 1 or len(summaries) < 2:
        return []
    begins = [
        [when[0] - offset for _, when in summary.collectives]
        for summary, offset in zip(summaries, offsets, strict=True)
    ]
    return [list(those) for those in zip(*begins, strict=True)]
