"""Augmentation of whole batches at once; what happens to a sample is drawn from its own numbers."""

import torch

from tutti.data.draws import Draws


class Shift:
    """Moves each image by up to `pixels` in both directions, filling with a constant."""

    def __init__(self, pixels: int, fill: float = 0) -> None:
        self.pixels = pixels
        self.fill = fill

    def pad(self, images: torch.Tensor) -> torch.Tensor:
        """The images with a margin on all sides, so that a shift is only a choice of window."""
        sides = [self.pixels] * 4
        return torch.nn.functional.pad(images, sides, value=self.fill)

    def windows(self, padded: torch.Tensor, ids: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """The images of the given ids out of the padded ones, each at its own offset, or all centred."""
        height, width = (size - 2 * self.pixels for size in padded.shape[2:])
        if draws is None:
            centre = slice(self.pixels, self.pixels + height), slice(self.pixels, self.pixels + width)
            return padded[ids][:, :, *centre]
        top, left = draws.integers(0, 2 * self.pixels), draws.integers(0, 2 * self.pixels)
        # Every window of every image as a view; choosing one copies only its own pixels.
        views = padded.unfold(2, height, 1).unfold(3, width, 1)
        return views[ids, :, top, left]
