"""Augmentation of whole batches at once; what happens to a sample is drawn from its own numbers."""

from typing import Literal

import numpy as np
import torch

from tutti.data.order import Draws

Fill = Literal["zero", "edge", "reflect"]
Flip = bool | Literal["alternate"]
_PADDING = {"zero": "constant", "edge": "edge", "reflect": "reflect"}


class MovedImages:
    """Images that are shifted by up to `shift` pixels in both directions and mirrored as they are taken.

    With `flip="alternate"` half of the images are mirrored in even epochs and the other half in odd ones.
    """

    def __init__(self, images: torch.Tensor, shift: int, flip: Flip = False, fill: Fill = "zero") -> None:
        self._shift, self._flip = shift, flip
        self._height, self._width = images.shape[2:]
        padded = _pad(images, shift, fill)
        self._padded = padded
        if images.device.type == "cpu":
            # Every window of every image as a view: a shift is a choice of window, and copies only its own pixels.
            self._windows = np.lib.stride_tricks.sliding_window_view(padded.numpy(), images.shape[2:], axis=(2, 3))

    def take(self, ids: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        """The images of the given ids, each moved in its own way, or all in their places."""
        top = left = torch.full_like(ids, self._shift)
        mirrored = None
        if draws is not None:
            if self._shift:
                top, left = draws.integers(0, 2 * self._shift), draws.integers(0, 2 * self._shift)
            if self._flip:
                mirrored = draws.alternating() if self._flip == "alternate" else draws.integers(0, 1).bool()
        take = self.take_windows if self._padded.device.type == "cpu" else self.gather
        return take(ids, top, left, mirrored)

    def take_windows(
        self, ids: torch.Tensor, top: torch.Tensor, left: torch.Tensor, mirrored: torch.Tensor | None
    ) -> torch.Tensor:
        """In memory, a window of each image."""
        images = torch.from_numpy(self._windows[ids.numpy(), :, top.numpy(), left.numpy()])
        if mirrored is not None:
            images[mirrored] = images[mirrored].flip(-1)
        return images

    def gather(
        self, ids: torch.Tensor, top: torch.Tensor, left: torch.Tensor, mirrored: torch.Tensor | None
    ) -> torch.Tensor:
        """On a GPU, one gather for the whole batch; the channels come out innermost."""
        choices = torch.stack((ids, top, left, ids if mirrored is None else mirrored.to(ids.dtype)))
        device = self._padded.device
        if device.type == "cuda":
            choices = choices.pin_memory().to(device, non_blocking=True)
        ids, top, left, mirrors = choices.unsqueeze(-1)
        rows = top + torch.arange(self._height, device=device)
        columns = torch.arange(self._width, device=device).expand(len(ids), -1)
        if mirrored is not None:
            columns = torch.where(mirrors.bool(), self._width - 1 - columns, columns)
        columns = columns + left
        return self._padded[ids[:, :, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _pad(images: torch.Tensor, pixels: int, fill: Fill) -> torch.Tensor:
    """Images with a margin, made on the CPU, where bytes need not become floats for it."""
    if not pixels:
        return images
    margins = ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels))
    return torch.from_numpy(np.pad(images.cpu().numpy(), margins, mode=_PADDING[fill])).to(images.device)  # pyright: ignore
