"""Triton kernels that copy crops: on a GPU, or interpreted where there is none."""

import numpy as np
import pytest
import torch

from tutti.data.nbody import device_source, kernel
from tutti.data.nbody.sources import Choices, channel_sources

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIDE = 13
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(channels: int, dtype: torch.dtype) -> torch.Tensor:
    field = torch.randn(SIDE, SIDE, SIDE, channels, generator=torch.Generator().manual_seed(channels))
    return field.to(DEVICE, dtype)


def indices(name: str, sizes: tuple[int, ...], vectors: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Strides and channels of all symmetries, at places over the whole box."""
    corners = np.random.default_rng(0).integers(0, SIDE - max(sizes) + 1, (48, 3))
    choices = Choices(corners, np.arange(48), vectors)
    found = (
        device_source.first_and_strides(choices, max(sizes), SIDE),
        device_source.channels_and_signs(name, choices),
    )
    strides, channels = (torch.from_numpy(each).to(DEVICE, dtype) for each in found)
    return strides, channels


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "channels"), [("Nbody", 4), ("Hydro", 5)])
def test_crops_under_all_symmetries_are_those_of_torch(
    name: str, channels: int, dtype: torch.dtype, vectors: bool
) -> None:
    field, sizes = made(channels, dtype), (9, 9, 9)  # more than one block, and no whole number of them
    given = *indices(name, sizes, vectors, torch.int32), sizes
    found, expected = kernel.gather(field, *given), device_source.gather(field, *given)
    assert torch.equal(found, expected)
    assert found.dtype == dtype and found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_crops_and_indices_of_64_bits(dtype: torch.dtype) -> None:
    field, sizes = made(4, dtype), (3, 9, 5)
    given = *indices("Nbody", sizes, True, torch.int64), sizes
    assert torch.equal(kernel.gather(field, *given), device_source.gather(field, *given))


def test_the_source_on_a_gpu_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_source.find_gather(torch.device("cuda")) is kernel.gather
    assert device_source.find_gather(torch.device("cpu")) is device_source.gather


def test_a_negated_channel_is_negated_in_its_bits() -> None:
    """A sign is a bit of a word: of zeros as well."""
    symmetry = next(each for each in range(48) if channel_sources(1, each, True)[1:] == [(1, -1), (2, 1), (3, 1)])
    field = torch.zeros(SIDE, SIDE, SIDE, 4, dtype=torch.bfloat16, device=DEVICE)
    choices = Choices(np.zeros((1, 3), np.int64), np.array([symmetry]))
    strides = torch.from_numpy(device_source.first_and_strides(choices, 4, SIDE)).to(DEVICE)
    channels = torch.from_numpy(device_source.channels_and_signs("Nbody", choices)).to(DEVICE)
    negative = torch.signbit(kernel.gather(field, strides, channels, (4, 4, 4)))
    assert negative[:, 1].all() and not negative[:, [0, 2, 3]].any()
