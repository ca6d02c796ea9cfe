"""Granted operations, executed by torch.distributed on every rank of a process set, and Adasum."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from tutti.horovod.engine.messages import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM, Response, TensorRequest

CHUNK = 1 << 16  # elements that are converted to double precision at once: they stay in the cache


def adasum(buffer: torch.Tensor, sizes: list[int], rank: int, size: int) -> None:
    """Combine the tensors that are packed in a buffer with those of all ranks by Adasum, in place, each by itself.

    Neighbours exchange first, then pairs of neighbours, and so on: after each round all ranks of a pair, a quadruple
    and so on hold the same result. Collective over all ranks; `size` is a power of two.
    """
    distance = 1 if buffer.numel() else size
    while distance < size:
        other = torch.empty_like(buffer)
        _exchange(buffer, other, rank ^ distance)
        lower, upper = (other, buffer) if rank & distance else (buffer, other)
        torch.cat([combine(*pair) for pair in zip(lower.split(sizes), upper.split(sizes), strict=True)], out=buffer)
        distance *= 2


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add orthogonal vectors and average parallel ones; in double precision, since a factor may overflow single."""
    dot, square_a, square_b = _products(a, b)
    of_a, of_b = _share(dot, square_a), _share(dot, square_b)
    pairs = zip(a.split(CHUNK), b.split(CHUNK), strict=True)
    return torch.cat([(of_a * x.double() + of_b * y.double()).to(a.dtype) for x, y in pairs])


def is_power_of_two(size: int) -> bool:
    """Return whether a number of ranks is a power of two, which Adasum needs."""
    return size > 0 and size & (size - 1) == 0


def _share(dot: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Return the factor of a vector; 1 for a zero vector."""
    return torch.where(square > 0, 1 - dot / (2 * square), torch.ones_like(square))


def _products(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the dot product and both squared norms, in double precision."""
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
# Before torch 2.13 only the old name exists; since then it warns.
_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_buffers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip


@dataclass
class OperationTensors:
    """A rank's tensors of one operation: input, output, and received splits."""

    tensor: torch.Tensor
    output: torch.Tensor | None  # where its size is known beforehand; may be the input itself
    received_splits: torch.Tensor | None = None
    filled: Future[None] | None = None  # done once the input is complete, where it was not at submission
    divided: bool = False  # the input has been divided by the number of ranks already


@dataclass(frozen=True)
class Members:
    """The ranks of a process set, the index of this rank among them, and torch's process group."""

    ranks: tuple[int, ...]
    place: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


def form(ranks: tuple[int, ...], rank: int) -> Members:
    """Create the process group of a process set; every rank of the job must enter, in the same order."""
    group = dist.new_group(list(ranks))
    return Members(ranks, ranks.index(rank) if rank in ranks else -1, group)  # pyright: ignore[reportArgumentType]


def dissolve(members: Members) -> None:
    """Close the connections of a process set, once no rank uses them; every rank must enter."""
    dist.all_reduce(torch.zeros(1))
    if members.place >= 0:
        dist.destroy_process_group(members.group)


def execute(response: Response, works: Sequence[OperationTensors | None], members: Members) -> None:
    """Execute a response; a rank that has joined has no tensors of its own and contributes zeros."""
    for work in works:
        if work is not None and work.filled is not None:
            work.filled.result()
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
    """Close the connections of a process set, so that no rank waits for this one."""
    group = members.group or dist.group.WORLD
    if members.size > 1 and group is not None:
        group.abort()
        dist.destroy_process_group(group)


def _allreduce(requests: Sequence[TensorRequest], works: Sequence[OperationTensors | None], members: Members) -> None:
    """Reduce tensors in one message, packed in a buffer unless there is only one."""
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
    buffer = _message_buffer(sum(sizes), DTYPES[first.dtype], _device(first, works))
    if own:
        torch.cat([work.tensor.reshape(-1) for work in own], out=buffer)
    else:  # this rank has joined, and contributes zeros
        buffer.zero_()
    factor = _reduce(buffer, first, members, sizes)
    outputs = [work.output for work in own if work.output is not None]
    if outputs:
        _unpack(buffer, outputs, factor)


def _reduce(buffer: torch.Tensor, request: TensorRequest, members: Members, sizes: list[int]) -> float:
    """Reduce over ranks, and return the factor that remains to be applied."""
    scale(buffer, request.prescale)
    if request.op == ADASUM:
        adasum(buffer, sizes, members.place, members.size)
    elif members.size > 1:
        dist.all_reduce(buffer, _REDUCTIONS[request.op], members.group)
    return request.postscale / members.size if request.op == AVERAGE else request.postscale


def _message_buffer(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a message, which is reused for the next one; one thread or stream uses it in order."""
    kept = _buffers.get((dtype, device))
    if kept is None or len(kept) < length:
        kept = _buffers[dtype, device] = torch.empty(length, dtype=dtype, device=device)
    return kept[:length]


def release() -> None:
    """Free the memory that is kept for messages."""
    _buffers.clear()


def _unpack(buffer: torch.Tensor, outputs: list[torch.Tensor], factor: float) -> None:
    """Copy a buffer to the output tensors, and apply the factor while copying where the dtype allows it."""
    if factor == 1.0 or buffer.dtype not in (torch.float32, torch.float64):
        scale(buffer, factor)
        torch._foreach_copy_(outputs, list(_unflatten_dense_tensors(buffer, outputs)))
        return
    for output, part in zip(outputs, _unflatten_dense_tensors(buffer, outputs), strict=True):
        torch.mul(part, factor, out=output)


def scale(buffer: torch.Tensor, factor: float) -> None:
    """Multiply in place: integers in double precision with truncation, half precision in single."""
    if factor == 1.0:
        return
    if not buffer.is_floating_point():
        buffer.copy_(buffer.double().mul_(factor).trunc_())
    elif buffer.dtype in (torch.float16, torch.bfloat16) and buffer.device.type == "cpu":
        buffer.copy_(buffer.float().mul_(factor))
    else:
        buffer.mul_(factor)


def _allgather(work: OperationTensors, rows: Sequence[int], members: Members) -> None:
    """Gather tensors whose first dimensions may differ; shorter ones are padded to the longest."""
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
    """Send rows to each rank; the splits of all ranks came with the grant."""
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
    """Reduce, and keep this rank's rows; the first ranks get one more where rows do not divide evenly."""
    whole = work.tensor.clone(memory_format=torch.contiguous_format)
    scale(whole.view(-1), _reduce(whole.view(-1), request, members, [whole.numel()]))
    counts = scattered_rows(len(whole), members.size)
    begin = sum(counts[: members.place])
    work.output = whole[begin : begin + counts[members.place]].clone()


def scattered_rows(rows: int, size: int) -> list[int]:
    """Return the number of rows of each rank."""
    return [rows // size + (place < rows % size) for place in range(size)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes: Gloo does not support all dtypes, and need not to move them."""
    return tensor.view(-1).view(torch.uint8)


def _device(request: TensorRequest, works: Sequence[OperationTensors | None]) -> torch.device:
    tensors = [work.tensor for work in works if work is not None]
    return tensors[0].device if tensors else torch.device(request.device)
