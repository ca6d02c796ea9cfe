"""Granted operations, carried out by torch.distributed on every rank of a process set; Adasum among them."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from tutti.horovod.engine.messages import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Response, TensorRequest

CHUNK = 1 << 16  # numbers that are made double at once: they stay in the cache


def adasum(buffer: torch.Tensor, sizes: list[int], rank: int, size: int) -> None:
    """Combine the tensors that lie side by side in a buffer with those of all ranks, in place, each by itself.

    Neighbours come first, then pairs of neighbours, and so on: after each round all ranks of a pair, a quadruple, ...
    hold the same, since partners compute the same from the same. All ranks of the job enter; `size` is a power of two.
    """
    distance = 1 if buffer.numel() else size
    while distance < size:
        other = torch.empty_like(buffer)
        _exchange(buffer, other, rank ^ distance)
        lower, upper = (other, buffer) if rank & distance else (buffer, other)
        torch.cat([combine(*pair) for pair in zip(lower.split(sizes), upper.split(sizes), strict=True)], out=buffer)
        distance *= 2


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Orthogonal vectors are added, parallel ones averaged; a short vector's share may be too large for single."""
    dot, square_a, square_b = _products(a, b)
    of_a, of_b = _share(dot, square_a), _share(dot, square_b)
    pairs = zip(a.split(CHUNK), b.split(CHUNK), strict=True)
    return torch.cat([(of_a * x.double() + of_b * y.double()).to(a.dtype) for x, y in pairs])


def is_power_of_two(size: int) -> bool:
    """Whether Adasum can pair so many ranks."""
    return size > 0 and size & (size - 1) == 0


def _share(dot: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """How much of a vector counts; all of one that is zero."""
    return torch.where(square > 0, 1 - dot / (2 * square), torch.ones_like(square))


def _products(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The dot product and both squares, in double precision."""
    total = torch.zeros(3, dtype=torch.float64, device=a.device)
    for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True):
        x, y = x.double(), y.double()
        total += torch.stack([x @ y, x @ x, y @ y])
    return total[0], total[1], total[2]


def _exchange(mine: torch.Tensor, theirs: torch.Tensor, partner: int) -> None:
    both = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


_REDUCTIONS = {
    AVERAGE: dist.ReduceOp.SUM,
    SUM: dist.ReduceOp.SUM,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
    PRODUCT: dist.ReduceOp.PRODUCT,
}
# The old name, which torch before 2.13 knows alone, warns since then.
_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_kept: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


@dataclass
class OperationTensors:
    """A rank's tensors for one operation: what goes in, where the result goes, and what else comes back."""

    tensor: torch.Tensor
    output: torch.Tensor | None  # of the right size where that is known beforehand, and perhaps the tensor itself
    received_splits: torch.Tensor | None = None
    filled: threading.Event | None = None  # set when what goes in is there, where that was not so from the first
    divided: bool = False  # what goes in has been divided by the number of ranks, for their mean


@dataclass(frozen=True)
class Members:
    """The ranks of a process set, where this rank stands among them, and torch's group for it."""

    ranks: tuple[int, ...]
    place: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


def form(ranks: tuple[int, ...], rank: int) -> Members:
    """A process set as this rank sees it; every rank of the job must enter, members or not, in the same order."""
    group = dist.new_group(list(ranks))
    return Members(ranks, ranks.index(rank) if rank in ranks else -1, group)  # pyright: ignore[reportArgumentType]


def dissolve(members: Members) -> None:
    """Close the connections of a set; every rank enters, so that none closes them while another still works there."""
    dist.all_reduce(torch.zeros(1))
    if members.place >= 0:
        dist.destroy_process_group(members.group)


def carry_out(response: Response, works: Sequence[OperationTensors | None], members: Members) -> None:
    """Do what a response says; a rank that has joined has no work of its own and lends zeros."""
    for work in works:
        if work is not None and work.filled is not None:
            work.filled.wait()
    if response.kind == "allreduce":
        _allreduce(response.requests, works, members)
        return
    for place, (request, work) in enumerate(zip(response.requests, works, strict=True)):
        assert work is not None or request.kind in ("barrier", "join")
        if request.kind == "allgather" and work:
            _allgather(work, response.sizes[place], members)
        elif request.kind == "broadcast" and work:
            _broadcast(request, work, members)
        elif request.kind == "alltoall" and work:
            _alltoall(work, response.sizes[place], members)
        elif request.kind == "reducescatter" and work:
            _reducescatter(request, work, members)


def abort(members: Members) -> None:
    """Close the connections of a set, so that no rank waits for one that has given up."""
    group = members.group or dist.group.WORLD
    if members.size > 1 and group is not None:
        group.abort()
        dist.destroy_process_group(group)


def _allreduce(requests: Sequence[TensorRequest], works: Sequence[OperationTensors | None], members: Members) -> None:
    """One message for all of them: side by side in a buffer, unless there is only one."""
    first = requests[0]
    single = works[0] if len(works) == 1 else None
    if single is not None and single.output is not None and single.output.is_contiguous():
        buffer = single.output.view(-1)
        if single.output is not single.tensor:
            buffer.copy_(single.tensor.reshape(-1))
        factor = _reduce(buffer, first, members, [len(buffer)])
        scale(buffer, factor * members.size if single.divided else factor)
        return
    sizes = [math.prod(request.shape) for request in requests]
    own = [work for work in works if work is not None]
    buffer = _room(sum(sizes), DTYPES[first.dtype], _device(first, works))
    if own:
        torch.cat([work.tensor.reshape(-1) for work in own], out=buffer)
    else:  # this rank has joined, and nothing of this is its own
        buffer.zero_()
    factor = _reduce(buffer, first, members, sizes)
    outputs = [work.output for work in own if work.output is not None]
    if outputs:
        _take_out(buffer, outputs, factor)


def _reduce(buffer: torch.Tensor, request: TensorRequest, members: Members, sizes: list[int]) -> float:
    """Reduce over ranks; what remains to be multiplied by."""
    scale(buffer, request.prescale)
    if request.op == ADASUM:
        adasum(buffer, sizes, members.place, members.size)
    elif members.size > 1:
        dist.all_reduce(buffer, _REDUCTIONS[request.op], members.group)
    return request.postscale / members.size if request.op == AVERAGE else request.postscale


def _room(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a message, which is kept for the next one; the thread or stream that uses it does so in order."""
    kept = _kept.get((dtype, device))
    if kept is None or len(kept) < length:
        kept = _kept[dtype, device] = torch.empty(length, dtype=dtype, device=device)
    return kept[:length]


def release() -> None:
    """Give back the memory that was kept for messages."""
    _kept.clear()


def _take_out(buffer: torch.Tensor, outputs: list[torch.Tensor], factor: float) -> None:
    """Put what lies side by side in its places, multiplied on the way where the type of numbers allows it."""
    if factor == 1.0 or buffer.dtype not in (torch.float32, torch.float64):
        scale(buffer, factor)
        torch._foreach_copy_(outputs, list(_unflatten_dense_tensors(buffer, outputs)))
        return
    for output, part in zip(outputs, _unflatten_dense_tensors(buffer, outputs), strict=True):
        torch.mul(part, factor, out=output)


def scale(buffer: torch.Tensor, factor: float) -> None:
    """Multiply in place: whole numbers in double precision and cut off, half precision in single."""
    if factor == 1.0:
        return
    if not buffer.is_floating_point():
        buffer.copy_(buffer.double().mul_(factor).trunc_())
    elif buffer.dtype in (torch.float16, torch.bfloat16) and buffer.device.type == "cpu":
        buffer.copy_(buffer.float().mul_(factor))
    else:
        buffer.mul_(factor)


def _allgather(work: OperationTensors, rows: Sequence[int], members: Members) -> None:
    """First dimensions may differ: short ones travel filled up to the longest."""
    inner = work.tensor.shape[1:]
    most = max(rows)
    whole = work.tensor.new_empty((members.size * most, *inner))
    own = whole.new_zeros((most, *inner))
    own[: len(work.tensor)] = work.tensor
    if most and members.size > 1:
        _gather(_as_bytes(whole), _as_bytes(own), members.group)
    elif most:
        whole.copy_(own)
    parts = [part[:count] for part, count in zip(whole.split(most) if most else [], rows, strict=False)]
    work.output = torch.cat(parts) if parts else whole


def _broadcast(request: TensorRequest, work: OperationTensors, members: Members) -> None:
    assert work.output is not None
    if work.output is not work.tensor:
        work.output.copy_(work.tensor)
    if members.size > 1 and work.output.numel():
        dist.broadcast(_as_bytes(work.output), request.root, members.group)


def _alltoall(work: OperationTensors, splits: Sequence[int], members: Members) -> None:
    """Rows for each rank; the table of all ranks' splits came with the grant."""
    size, place = members.size, members.place
    sent = splits[place * size : (place + 1) * size]
    received = [splits[other * size + place] for other in range(size)]
    tensor = work.tensor[: sum(sent)].contiguous()
    work.output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work.received_splits = torch.tensor(received, dtype=torch.int32)
    width = math.prod(tensor.shape[1:]) * tensor.element_size()
    if size == 1:
        work.output.copy_(tensor)
        return
    parts = ([rows * width for rows in counts] for counts in (received, sent))
    dist.all_to_all_single(_as_bytes(work.output), _as_bytes(tensor), *parts, group=members.group)


def _reducescatter(request: TensorRequest, work: OperationTensors, members: Members) -> None:
    """The first ranks get one more row where rows do not divide."""
    whole = work.tensor.clone(memory_format=torch.contiguous_format)
    scale(whole.view(-1), _reduce(whole.view(-1), request, members, [whole.numel()]))
    counts = scattered_rows(len(whole), members.size)
    begin = sum(counts[: members.place])
    work.output = whole[begin : begin + counts[members.place]].clone()


def scattered_rows(rows: int, size: int) -> list[int]:
    """How many rows each rank gets."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: Gloo does not know all kinds of numbers, and need not when it only moves them."""
    return tensor.view(-1).view(torch.uint8)


def _device(request: TensorRequest, works: Sequence[OperationTensors | None]) -> torch.device:
    tensors = [work.tensor for work in works if work is not None]
    return tensors[0].device if tensors else torch.device(request.device)
