"""The order of numbers in memory: images with their channels innermost, which convolutions like best."""

from typing import Any

import torch
from torch import nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def put_channels_last(model: nn.Module) -> None:
    """Lay out the weights of a model for images with their channels innermost."""
    for parameter in model.parameters():
        parameter.data = channels_last(parameter.data)


def channels_last(batch: Any) -> Any:
    """A batch of images or volumes with the channels innermost; anything else as it is."""
    if isinstance(batch, torch.Tensor) and batch.ndim in _FORMATS:
        # Not contiguous(): with one channel it takes both layouts for the same, and convolutions then choose the other.
        return batch.to(memory_format=_FORMATS[batch.ndim])
    return batch
