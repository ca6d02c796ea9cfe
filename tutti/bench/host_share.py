"""The share of a step in which the device has nothing to do: launches, Python, synchronisations."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler_util import DeviceType

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler writes on the screen that it starts and stops

_SECONDS = 0.3  # of steps on the clock without a profiler
_MOST_STEPS = 10
_TINY_STEPS = 5


@dataclass(frozen=True)
class Operator:
    """One call of an operator on the host."""

    name: str
    own_seconds: float  # without the operators inside it
    inside: int  # operators directly inside it


def host_share(step: Callable[[], object], device: torch.device) -> float | None:
    """Of a step's time on the clock, the part in which no kernel works; None where none could be seen.

    A profiler makes the host slower and leaves kernels as they are: their time, seen under it, is held against steps
    without it.
    """
    step()
    steps, seconds = _unwatched(step, device)
    with _watch(device) as watched:
        for _ in range(steps):
            step()
        _finish(device)
    events = watched.function_events or []
    if device.type == "cuda":
        working = covered(_kernels(events))
    else:
        working = working_seconds(_operators(events), dispatch_costs())
    return min(1.0, max(0.0, 1 - working / steps / seconds)) if working else None


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def working_seconds(operators: Iterable[Operator], costs: Mapping[str, float]) -> float:
    """What operators take beyond the cost of calling them.

    An operator that the costs do not name has the middle one. Calls inside an operator cost it something, too: about
    as much again.
    """
    usual = statistics.median(costs.values()) if costs else 0.0
    return sum(
        max(0.0, each.own_seconds - costs.get(each.name, usual) - each.inside * usual / 2) for each in operators
    )


def dispatch_costs() -> dict[str, float]:
    """By operator, its least time on the tiniest tensors, as the profiler sees it here."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.5), torch.optim.Adam(model.parameters())]
    inputs, targets = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)

    def tiny_step() -> None:
        for optimizer in optimizers:
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    tiny_step()
    with _watch(torch.device("cpu")) as watched:
        for _ in range(_TINY_STEPS):
            tiny_step()
    return least_by_name(_operators(watched.function_events or []))


def least_by_name(operators: Iterable[Operator]) -> dict[str, float]:
    """The quickest call of each operator."""
    least: dict[str, float] = {}
    for each in operators:
        least[each.name] = min(each.own_seconds, least.get(each.name, each.own_seconds))
    return least


def _watch(device: torch.device) -> profiler.profile:
    return profiler.profile(use_device="cuda" if device.type == "cuda" else None, use_kineto=True)


def _unwatched(step: Callable[[], object], device: torch.device) -> tuple[int, float]:
    """How many steps fit into the time for it, and the seconds of one of them."""
    first = _clock(step, device, 1)
    steps = max(1, min(_MOST_STEPS, int(_SECONDS / first)))
    return steps, min(first, _clock(step, device, steps), _clock(step, device, steps))


def _clock(step: Callable[[], object], device: torch.device, steps: int) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _finish(device)
    return (time.perf_counter() - start) / steps


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
