"""The share of a step in which the device has nothing to do: launches, Python, synchronisations."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler_util import DeviceType

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler writes on the screen that it starts and stops

_SECONDS = 0.3  # of steps on the clock without a profiler
_SCHEDULED = Path("/proc/thread-self/schedstat")
_LEAST_TIMES, _MOST_TIMES = 3, 15
_MOST_EVENTS = 20_000  # of which a profiler's tables are made
_SUBSTANCE = 3.0  # an operator that takes less than this times the cost of its call only costs its call
_TINY_STEPS = 5


@dataclass(frozen=True)
class Operator:
    """One call of an operator on the host."""

    name: str
    own_seconds: float  # without the operators inside it
    inside: int  # operators directly inside it


def host_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Of a step's time on the clock, the part in which no kernel works; None where nothing could be seen.

    A profiler makes the host slower and leaves kernels as they are: their time, seen under it, is held against steps
    without it. The two alternate, since a machine that others use is now faster and now slower.
    """
    step()
    first = _clock(step, device, 1)
    times = max(_LEAST_TIMES, min(_MOST_TIMES, int(_SECONDS / first)))
    in_a_row = times if device.type == "cuda" else 1  # a GPU must not run dry between two of them
    clocked: list[float] = []
    watched: list[Sequence[Any]] = []
    while len(clocked) < _LEAST_TIMES or (in_a_row == 1 and len(clocked) < times and _count(watched) < _MOST_EVENTS):
        clocked.append(_clock(step, device, in_a_row))
        watched.append(_events(step, device, in_a_row))
    if device.type == "cuda":
        working = statistics.median(covered(_kernels(events)) for events in watched) / in_a_row
    else:
        working = working_seconds(usual_calls([_operators(events) for events in watched]), dispatch_costs())
    if not _count(watched) or (device.type == "cuda" and not working):
        return None
    return min(1.0, max(0.0, 1 - working / min(clocked)))


def usual_calls(steps: Sequence[Sequence[Operator]]) -> Sequence[Operator]:
    """The calls of a step, each with its usual time in several steps: other processes interrupt one or another.

    Steps that do not make the same calls are not comparable: then it is the one in the middle.
    """
    if len({tuple(each.name for each in step) for step in steps}) > 1:
        return sorted(steps, key=lambda step: sum(each.own_seconds for each in step))[(len(steps) - 1) // 2]
    return [
        Operator(same[0].name, statistics.median_low(each.own_seconds for each in same), same[0].inside)
        for same in zip(*steps, strict=True)
    ]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def working_seconds(operators: Iterable[Operator], costs: Mapping[str, float]) -> float:
    """What operators take beyond the cost of calling them; one that takes hardly more than that does no work.

    An operator that the costs do not name has the middle one. Calls inside an operator cost it something, too: about
    as much again.
    """
    usual = statistics.median(costs.values()) if costs else 0.0
    total = 0.0
    for each in operators:
        cost = max(usual, costs.get(each.name, usual)) + each.inside * usual
        total += each.own_seconds - cost if each.own_seconds > _SUBSTANCE * cost else 0.0
    return total


def dispatch_costs() -> dict[str, float]:
    """By operator, its time on the tiniest tensors, as the profiler sees it here."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.5), torch.optim.Adam(model.parameters())]
    inputs, targets = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)

    def tiny_step() -> None:
        for optimizer in optimizers:
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    tiny_step()
    return usual_by_name(_operators(_events(tiny_step, torch.device("cpu"), _TINY_STEPS)))


def usual_by_name(operators: Iterable[Operator]) -> dict[str, float]:
    """The middle one of the calls of each operator."""
    calls: dict[str, list[float]] = {}
    for each in operators:
        calls.setdefault(each.name, []).append(each.own_seconds)
    return {name: statistics.median(seconds) for name, seconds in calls.items()}


def _events(step: Callable[[], object], device: torch.device, steps: int) -> Sequence[Any]:
    """What a profiler sees of some steps."""
    watched = profiler.profile(use_device="cuda" if device.type == "cuda" else None, use_kineto=True)
    with watched:
        for _ in range(steps):
            step()
        _finish(device)
    return watched.function_events or []


def _clock(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Seconds of a step, without those in which other processes had the core."""
    _finish(device)
    waited, start = _waited(), time.perf_counter()
    for _ in range(steps):
        step()
    _finish(device)
    return (time.perf_counter() - start - (_waited() - waited if device.type == "cpu" else 0.0)) / steps


def _waited() -> float:
    """Seconds for which this thread could have run and was not let, as far as Linux tells."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def _count(watched: Sequence[Sequence[Any]]) -> int:
    return sum(map(len, watched))


def _kernels(events: Sequence[Any]) -> list[tuple[float, float]]:
    """When kernels and copies ran on the GPU, in seconds."""
    return [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def _operators(events: Sequence[Any]) -> list[Operator]:
    return [
        Operator(event.name, event.self_cpu_time_total * 1e-6, len(event.cpu_children))
        for event in events
        if _computes(event)
    ]


def _computes(event: Any) -> bool:
    """Whether an event is an operator: ranges and the engine of the backward pass only enclose some."""
    if "CompiledFxGraph" in event.name:
        return True
    return not event.is_user_annotation and not event.name.startswith(("autograd::", "torch::autograd::"))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
