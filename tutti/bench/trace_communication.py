"""What of a trace is communication between ranks, and what is computing."""

from collections.abc import Sequence

from tutti.bench.trace_intervals import Interval, by_track, subtract, union
from tutti.bench.traces import Span

DIRECT = "memory:all_reduce"  # gradients averaged through the memory of a host, not through Gloo
Collective = tuple[str, Interval]

_QUEUED = ("gloo:", "mpi:", "ucc:")  # carried out by another thread than the one that asks


def is_communication(span: Span) -> bool:
    """What carries data between ranks: an operation of the host, or a kernel of NCCL."""
    if span.kind == "kernel":
        return span.name.lower().startswith("nccl")
    return span.is_on_host and span.name.startswith((*_QUEUED, DIRECT))


def find_collectives(spans: Sequence[Span], on_gpu: bool) -> list[Collective]:
    """Every operation between ranks, in the order of time: from where it is asked for, not only from where it runs.

    Between the two it waits for a thread to take it. Requests are told from those for NCCL only where there is no GPU.
    """
    found = sorted((span for span in spans if is_communication(span)), key=lambda span: span.begin)
    queued = [span for span in found if span.name.startswith(_QUEUED)]
    asked = [] if on_gpu else sorted((s for s in spans if _asks_for_it(s)), key=lambda span: span.begin)
    begins: dict[Span, Span] = dict(zip(queued, asked, strict=True)) if len(queued) == len(asked) else {}
    collectives = []
    for span in found:
        by = begins.get(span, span)
        collectives.append((span.name, (min(span.begin, by.begin), max(span.end, by.end))))
    return sorted(collectives, key=lambda one: one[1])


def find_computing(spans: Sequence[Span], on_gpu: bool) -> list[Interval]:
    """The moments in which a GPU works on other things than communication; on CPUs, in which an operator runs.

    An operator that communicates before it returns does not compute meanwhile.
    """
    if on_gpu:
        return union((s.begin, s.end) for s in spans if s.is_work_of_gpu and not is_communication(s))
    running: list[Interval] = []
    for those in by_track(spans).values():
        talking = union((span.begin, span.end) for span in those if is_communication(span) or _asks_for_it(span))
        running += subtract(union((span.begin, span.end) for span in those if span.kind == "cpu_op"), talking)
    return union(running)


def _asks_for_it(span: Span) -> bool:
    """The operator by which a thread of the host asks for communication, and may wait for it."""
    return span.kind == "cpu_op" and span.name.startswith("c10d::")
