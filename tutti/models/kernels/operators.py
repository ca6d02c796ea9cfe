"""The operators of torch that call our kernels of convolutions, and how they divide their work on an H200."""

import torch

from tutti.models.kernels.convolution import Tiling, gather, positions_of, scatter, weight_gradient

_LAYOUT = torch.channels_last_3d
_PROCESSORS = 132  # multiprocessors of an H100 or H200


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """Channels last in the shape as well as in memory."""
    return tensor.contiguous(memory_format=_LAYOUT).permute(0, 2, 3, 4, 1)


@torch.library.custom_op("tutti::conv_gather", mutates_args=())
def conv_gather(large: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slope: float) -> torch.Tensor:
    """B x C x 2D x 2H x 2W to B x O x D x H x W; negative results are multiplied by a slope."""
    tiles = large.numel() // large.shape[1] // 8 * len(weight) // (128 * 256)
    tiling = Tiling(128, 256) if tiles >= _PROCESSORS // 2 + 1 else Tiling(128, 128, stages=6)
    return gather(_inner(large), _inner(weight), bias, slope, tiling).permute(0, 4, 1, 2, 3)


@conv_gather.register_fake
def _(large: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slope: float) -> torch.Tensor:
    sizes = [size // 2 for size in large.shape[2:]]
    return _empty(large, len(large), len(weight), *sizes)


@torch.library.custom_op("tutti::conv_scatter", mutates_args=())
def conv_scatter(small: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slope: float) -> torch.Tensor:
    """B x O x D x H x W to B x C x 2D x 2H x 2W; negative results are multiplied by a slope."""
    tiling = Tiling(128, 256) if weight.shape[1] % 128 == 0 else Tiling(64, 512, stages=3)
    return scatter(_inner(small), _inner(weight), bias, slope, tiling).permute(0, 4, 1, 2, 3)


@conv_scatter.register_fake
def _(small: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slope: float) -> torch.Tensor:
    sizes = [2 * size for size in small.shape[2:]]
    return _empty(small, len(small), weight.shape[1], *sizes)


@torch.library.custom_op("tutti::conv_weight", mutates_args=())
def conv_weight(small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """The gradient O x C x 4 x 4 x 4 from the small volume and the large one, or from their gradients."""
    tiles = 16 * (large.shape[1] // 64) * (small.shape[1] // 128)
    tiling = Tiling(128, 64, splits=max(1, _PROCESSORS // tiles))
    return weight_gradient(_inner(small), _inner(large), tiling).permute(0, 4, 1, 2, 3)


@conv_weight.register_fake
def _(small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    return _empty(small, small.shape[1], large.shape[1], 4, 4, 4)


@torch.library.custom_op("tutti::folded_gather", mutates_args=())
def folded_gather(folded: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slope: float) -> torch.Tensor:
    """A folded volume and O x C x 4 x 4 x 4 to B x O x D x H x W; negative results are multiplied by a slope."""
    taps = weight.permute(0, 2, 4, 3, 1).reshape(len(weight), 4, -1).contiguous()
    tiling = Tiling(64, 128, warps=4, stages=2)
    return gather(folded, taps, bias, slope, tiling, folded=True).permute(0, 4, 1, 2, 3)


@folded_gather.register_fake
def _(folded: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slope: float) -> torch.Tensor:
    batch, *sizes = positions_of(folded, folded=True)
    return _empty(folded, batch, len(weight), *sizes)


@torch.library.custom_op("tutti::folded_weight", mutates_args=())
def folded_weight(small: torch.Tensor, folded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients O x C x 4 x 4 x 4 and O of weight and bias, from that of the small volume and the folded one."""
    tiling = Tiling(64, 64, warps=4, splits=2 * _PROCESSORS)
    sums = small.new_empty(tiling.splits, small.shape[1], dtype=torch.float32)
    taps = weight_gradient(_inner(small), folded, tiling, sums).view(-1, 4, 4, 4, folded.shape[-1] // 4)
    return taps.permute(0, 4, 1, 3, 2).contiguous(memory_format=_LAYOUT), sums.sum(0).to(small.dtype)


@folded_weight.register_fake
def _(small: torch.Tensor, folded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = small.shape[1]
    return _empty(small, out, folded.shape[-1] // 4, 4, 4, 4), small.new_empty(out)


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=_LAYOUT)
