"""The work of a step: floating-point operations, bytes, operators, synchronizations, idle time of the device."""

import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler
from torch.autograd.profiler_util import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from tutti.bench.results import Work
from tutti.data.dataset import tensors_in

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler prints when it starts and stops

_SECONDS = 0.3  # of steps timed without a profiler
_SCHEDULED = Path("/proc/thread-self/schedstat")
_LEAST_TIMES, _MOST_TIMES = 3, 15
_MOST_EVENTS = 20_000  # that the profiler processes
_OVERHEAD_FACTOR = 3.0  # an operator that takes less than this times the overhead of its call is overhead alone
_TINY_STEPS = 5


@dataclass(frozen=True)
class Operator:
    """One call of an operator on the host."""

    name: str
    own_seconds: float  # without the operators inside it
    inside: int  # operators directly inside it


def host_share(step: Callable[[], object], device: torch.device) -> float | None:
    """The share of a step's wall time in which the device is idle; None where it could not be measured.

    A profiler slows the host down, but not the kernels: the time of kernels with the profiler is compared with the
    time of steps without it. The two alternate, since the speed of a shared machine changes.
    """
    step()
    first = _clock(step, device, 1)
    times = max(_LEAST_TIMES, min(_MOST_TIMES, int(_SECONDS / first)))
    in_a_row = times if device.type == "cuda" else 1  # the queue of a GPU must not become empty between steps
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
    """The calls of a step, each with its median time over several steps, since other processes may interrupt some.

    Steps with different calls are not comparable: then these are the calls of the step with the median time.
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
    """The time of operators without the overhead of their calls; one that takes hardly longer does no work.

    An operator without a known overhead has the median one. Each call inside an operator adds as much.
    """
    usual = statistics.median(costs.values()) if costs else 0.0
    total = 0.0
    for each in operators:
        cost = max(usual, costs.get(each.name, usual)) + each.inside * usual
        total += each.own_seconds - cost if each.own_seconds > _OVERHEAD_FACTOR * cost else 0.0
    return total


def dispatch_costs() -> dict[str, float]:
    """The time of each operator on tensors of one or two elements, according to the profiler."""
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
    """The median time of the calls of each operator."""
    calls: dict[str, list[float]] = {}
    for each in operators:
        calls.setdefault(each.name, []).append(each.own_seconds)
    return {name: statistics.median(seconds) for name, seconds in calls.items()}


def _events(step: Callable[[], object], device: torch.device, steps: int) -> Sequence[Any]:
    """The profiler events of some steps."""
    watched = profiler.profile(use_device="cuda" if device.type == "cuda" else None, use_kineto=True)
    with watched:
        for _ in range(steps):
            step()
        _finish(device)
    return watched.function_events or []


def _clock(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Seconds of a step, without those in which other processes used the core."""
    _finish(device)
    waited, start = _waited(), time.perf_counter()
    for _ in range(steps):
        step()
    _finish(device)
    return (time.perf_counter() - start - (_waited() - waited if device.type == "cpu" else 0.0)) / steps


def _waited() -> float:
    """Seconds for which this thread was runnable but not scheduled, according to Linux; 0 if unknown."""
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
    """Returns whether an event is an operator, not a range or the autograd engine, which only enclose operators."""
    if "CompiledFxGraph" in event.name:
        return True
    return not event.is_user_annotation and not event.name.startswith(("autograd::", "torch::autograd::"))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_INSIDE = (f"{Path(torch.__file__ or '').parent}/", f"{Path(__file__).parent.parent}/")
_OPTIMIZERS = f"{_INSIDE[0]}optim/"
_ALLOCATE = ("empty", "new_empty")
_OVERWRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}  # do not read what they write to
_PICK = {"embedding", "index", "index_select", "gather", "take", "index_put_", "index_add_", "scatter_", "scatter_add_"}
_SYNCHRONISE = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "bincount"}
_COPY = {"copy_", "_to_copy"}


def count_work(
    step: Callable[[], object],
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    cache_bytes: int,
    note: Callable[[str], None] = lambda _: None,
) -> Work:
    """Count the work of a step on a batch in memory, without communication; what cannot be counted becomes a note."""
    share = _attempt(lambda: host_share(step, device), optimizer, "the host's share of a step", note)
    flops = FlopCounterMode(display=False, custom_mapping=_own_formulas())
    counter = OperatorCounter(device, cache_bytes)
    _attempt(lambda: _under(flops, step), optimizer, "operations", note)
    _attempt(lambda: _under(counter, step), optimizer, "bytes and operators", note)
    return Work(
        flops=float(flops.get_total_flops()),
        bytes_moved=float(counter.bytes_moved),
        least_bytes=float(least_bytes(model, optimizer, batch)),
        operators=counter.operators,
        synchronisations=sum(counter.places.values()),
        synchronises_at=tuple(f"{place}, {count} a step" for place, count in counter.places.most_common()),
        host_share=share,
    )


def least_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> int:
    """The bytes that a step must move at least, if nothing stays in a cache."""
    weights = sum(each.nbytes for each in model.parameters())
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    state = sum(tensor.nbytes for values in optimizer.state.values() for tensor in tensors_in(values))
    read_in_passes, gradients, updates = 2 * weights, 2 * trained, 2 * trained
    return read_in_passes + gradients + updates + 2 * state + sum(each.nbytes for each in tensors_in(batch))


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that torch dispatches, including those of the backward pass."""

    def __init__(self, device: torch.device, cache_bytes: int) -> None:
        super().__init__()
        self.operators = 0
        self.bytes_moved = 0
        self.places: Counter[str] = Counter()  # lines at which the host waits for the device
        self._device = device
        self._cache_bytes = cache_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = self._synchronises_at(func, args, kwargs)
        if place:
            self.places[place] += 1
        result = func(*args, **kwargs)
        if not is_view(func, args, result) and not _name(func).startswith(_ALLOCATE):
            self.operators += 1
            self.bytes_moved += moved_bytes(func, args, kwargs, result, self._cache_bytes)
        return result

    def _synchronises_at(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """The line that makes the host wait, if this operator does; on a CPU only lines of user code count."""
        name, tensors = _name(func), list(tensors_in((args, kwargs)))
        if name in _COPY:
            source = tensors[-1] if tensors else None
            target = kwargs.get("device") or (tensors[0].device if name == "copy_" else None)
            if source is None or target is None or not source.is_cuda or torch.device(target).type != "cpu":
                return None
        elif name == "index":
            if not any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:]):
                return None
        elif name not in _SYNCHRONISE:
            return None
        if self._device.type == "cuda":
            return innermost_line() if any(tensor.is_cuda for tensor in tensors) else None
        return innermost_line() if name == "_local_scalar_dense" else None


def innermost_line() -> str | None:
    """The innermost line of user code in the call stack of the step that is counted.

    Optimizers of torch that read their own step counter are left out.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OPTIMIZERS) or (frame.f_code is _under.__code__):
            return None
        if not name.startswith((*_INSIDE, "<")):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_view(func: Any, args: Any, result: Any) -> bool:
    """Returns whether the result of an operator is a view of existing memory."""
    schema = func._schema
    if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
        return True
    if schema.is_mutable or not isinstance(result, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
        return False
    return result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr() != 0


def moved_bytes(func: Any, args: Any, kwargs: Any, result: Any, cache_bytes: int) -> int:
    """Bytes that an operator reads and writes; 0 if all of them fit into the cache."""
    written = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    writes = [_bytes(tensor) for tensor in tensors_in(written)]
    reads = [_bytes(tensor) for tensor in tensors_in((args, kwargs))]
    makes = 0 if func._schema.is_mutable else sum(_bytes(tensor) for tensor in tensors_in(result))
    if _name(func) in _OVERWRITE:
        reads = reads[len(writes) :]
    elif _name(func) in _PICK and reads:  # only the selected rows are read
        picked = min(reads[0], sum(reads[1:]) + makes)
        reads, writes = [picked, *reads[1:]], [picked] if writes else []
    distinct = max(sum(reads), sum(writes)) + makes
    return sum(reads) + sum(writes) + makes if distinct > cache_bytes else 0


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor in memory; an expanded dimension takes none."""
    if tensor.layout != torch.strided:
        return tensor.nbytes
    count = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _under(mode: AbstractContextManager[Any], step: Callable[[], object]) -> None:
    """Run one step in a dispatch mode, without compilation."""
    with torch.compiler.set_stance("force_eager"), mode:
        step()


def _attempt(call: Callable[[], Any], optimizer: torch.optim.Optimizer, what: str, note: Callable[[str], None]) -> Any:
    """The result of a call; an error while counting becomes a note and does not end the measurement."""
    try:
        return call()
    except Exception as error:
        optimizer.zero_grad()
        note(f"{what} could not be counted: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return None


def _own_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for the operations of tutti's own operators, which torch does not know."""

    def forward(
        volume: Any, weight: Any, bias: Any, slope: float, doubles: bool, out_shape: Any = None, **_: Any
    ) -> int:
        return conv_flop_count(volume, weight, out_shape, transposed=doubles)

    def backward(grad: Any, volume: Any, weight: Any, doubles: bool, **_: Any) -> int:
        return 2 * conv_flop_count(volume, weight, grad, transposed=doubles)

    def folded_forward(folded: Any, weight: Any, bias: Any, slope: float, out_shape: Any = None, **_: Any) -> int:
        return 2 * math.prod(out_shape) * math.prod(weight[1:])

    def folded_backward(small: Any, folded: Any, out_shape: Any = None, **_: Any) -> int:
        return 2 * math.prod(small) * math.prod(out_shape[0][1:])

    formulas = {
        "strided_convolution": forward,
        "strided_convolution_backward": backward,
        "folded_gather": folded_forward,
        "folded_weight": folded_backward,
    }
    known = torch.ops.tutti
    return {getattr(known, name): formula for name, formula in formulas.items() if hasattr(known, name)}
