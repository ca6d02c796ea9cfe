"""Adasum: a sum that takes out what two gradients have in common, so that parallel ones are averaged."""

import torch
import torch.distributed as dist

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
