"""Augmentation of whole batches at once; what happens to a sample is drawn from its own numbers."""

import numpy as np
import torch

from tutti.data.draws import Draws


class Shift:
    """Images that are moved by up to `pixels` in both directions as they are taken, and filled with a constant."""

    def __init__(self, images: torch.Tensor, pixels: int, fill: float = 0) -> None:
        self._pixels = pixels
        padded = torch.nn.functional.pad(images, [pixels] * 4, value=fill).numpy()
        # Every window of every image as a view: a shift is a choice of window, and copies only its own pixels.
        self._windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))

    def take(self, ids: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """The images of the given ids, each at its own offset, or all in their places."""
        if draws is None:
            return torch.from_numpy(self._windows[ids.numpy(), :, self._pixels, self._pixels])
        top, left = draws.integers(0, 2 * self._pixels), draws.integers(0, 2 * self._pixels)
        return torch.from_numpy(self._windows[ids.numpy(), :, top.numpy(), left.numpy()])
