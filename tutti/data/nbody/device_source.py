"""Crops from a box on a GPU, with the same numbers as from memory and disk."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from tutti.data.nbody.box import CHANNELS, SCALARS
from tutti.data.nbody.sources import AXES, FLIPS, Choices, channel_sources


class DeviceSource:
    """The whole box on the device: crops are gathered there, and only corners and symmetries are sent to it.

    A crop under a symmetry is a first cell and one signed stride for each axis. The channels of a cell are adjacent
    in memory, so that reads across the rows of the box are not of single numbers.
    """

    def __init__(
        self,
        fields: Iterator[tuple[str, np.ndarray]],
        crop: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,  # of the inputs
    ) -> None:
        dtypes = {"Nbody": dtype, "Hydro": torch.float32}
        self._fields = {name: _channels_last(field, device, dtypes[name]) for name, field in fields}
        self._crop, self._device = crop, device
        self._gather = find_gather(device)
        few = all(field.numel() < 2**31 for field in self._fields.values())
        self._indices = np.int32 if few else np.int64  # index arithmetic of 32 bits takes less time on a GPU

    def crops(self, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
        side = len(self._fields["Nbody"])
        sizes = tuple(size for _, size in choices.window(self._crop))
        strides = self._sent(first_and_strides(choices, self._crop, side))
        inputs, targets = (
            self._gather(field, strides, self._sent(channels_and_signs(name, choices)), sizes)
            for name, field in self._fields.items()
        )
        return inputs, targets

    def _sent(self, numbers: np.ndarray) -> torch.Tensor:
        """A copy of indices on the device."""
        made = torch.from_numpy(numbers.astype(self._indices))
        return made.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else made


Gather = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]], torch.Tensor]


def find_gather(device: torch.device) -> Gather:
    """The kernel on a GPU, if triton is there, else operators of torch."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):  # triton is installed with torch where it supports the GPU
            from tutti.data.nbody import kernel

            return kernel.gather
    return gather


def gather(field: torch.Tensor, strides: torch.Tensor, channels: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Returns crops of a field, samples x channels x sizes, in channels-last memory format."""
    depth, height, width = (torch.arange(size, device=field.device, dtype=strides.dtype) for size in sizes)
    first, along = strides[:, 0].view(-1, 1, 1, 1), strides[:, 1:].reshape(-1, 3, 1, 1, 1)
    cells = first + along[:, 0] * depth.view(-1, 1, 1) + along[:, 1] * height.view(-1, 1) + along[:, 2] * width
    spread = (len(strides), 1, 1, 1, -1)
    index = cells.unsqueeze(-1) * field.shape[-1] + channels[0].view(spread)
    return (field.view(-1)[index] * channels[1].view(spread)).permute(0, 4, 1, 2, 3)


def _channels_last(field: np.ndarray, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Copies a field to the device as side^3 x channels, one channel at a time."""
    stored = torch.empty(*field.shape[1:], len(field), device=device, dtype=dtype)
    for channel, values in enumerate(field):
        stored[..., channel] = torch.from_numpy(values).to(device)
    return stored


def first_and_strides(choices: Choices, crop: int, side: int) -> np.ndarray:
    """Returns for each sample the first cell and the strides along the three axes, in cells of the flat field."""
    strides = np.array([side * side, side, 1])
    axes, flips = AXES[choices.symmetries], FLIPS[choices.symmetries]
    along = strides[axes]
    signed = np.where(flips, -along, along)
    starts = np.array([start for start, _ in choices.window(crop)])
    first = choices.corners @ strides + (along * (crop - 1) * flips).sum(1) + (signed * starts).sum(1)
    return np.concatenate([first[:, None], signed], axis=1)


def channels_and_signs(name: str, choices: Choices) -> np.ndarray:
    """Returns the source channels and signs of each sample as 2 x samples x channels."""
    found = np.zeros((2, len(choices), CHANNELS[name]), np.int64)
    for sample, symmetry in enumerate(choices.symmetries):
        for channel, pair in enumerate(channel_sources(SCALARS[name], int(symmetry), choices.vectors)):
            found[:, sample, channel] = pair
    return found
