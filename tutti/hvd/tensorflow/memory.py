"""Memory for results, kept for the next step: new pages cost more time than the copy of what goes there."""

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch

_LINE = 64  # bytes: where TensorFlow takes an array over as it is, and vectors of the processor begin
_MOST_KEPT = 8  # pieces that nobody uses

_free: list[torch.Tensor] = []


def side_by_side(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for tensors of one type in one piece: the whole of it, and a place for each of them."""
    width = tensors[0].element_size()
    sizes = [_LINE * math.ceil(tensor.nbytes / _LINE) // width for tensor in tensors]
    whole = take(sum(sizes) * width).view(tensors[0].dtype)
    parts = zip(whole.split(sizes), tensors, sizes, strict=True)
    return whole, [
        (part if tensor.numel() == size else part[: tensor.numel()]).view(tensor.shape) for part, tensor, size in parts
    ]


def take(size: int) -> torch.Tensor:
    """So many bytes; the memory comes back when nothing refers to them any more."""
    fitting = [each for each in _free if len(each) == size]
    if fitting:
        kept = fitting[-1]
        _free[:] = [each for each in _free if each is not kept]
    else:
        kept = torch.empty(size, dtype=torch.uint8)
    lent: np.ndarray = kept.numpy()
    weakref.finalize(lent, _give_back, kept).atexit = False
    return torch.from_numpy(lent)


def _give_back(kept: torch.Tensor) -> None:
    _free.append(kept)
    del _free[:-_MOST_KEPT]
