"""Channels innermost: the strides that convolutions look at, with one channel too."""

import pytest
import torch
from torch import nn

from tutti.train.learner import channels_last, put_channels_last


@pytest.mark.parametrize("channels", [1, 3])
def test_images_and_volumes_get_their_channels_innermost(channels: int) -> None:
    assert channels_last(torch.zeros(2, channels, 4, 5)).stride() == (20 * channels, 1, 5 * channels, channels)
    volumes = channels_last(torch.zeros(2, channels, 3, 4, 5))
    assert volumes.stride() == (60 * channels, 1, 20 * channels, 5 * channels, channels)


def test_what_is_no_image_stays_as_it_is() -> None:
    for other in (torch.zeros(3), torch.zeros(2, 3), {"a": 1}):
        assert channels_last(other) is other


def test_a_convolution_laid_out_so_gives_images_laid_out_so() -> None:
    layer = nn.Conv2d(1, 10, 5)
    expected = layer(torch.ones(2, 1, 8, 8))
    put_channels_last(layer)
    found = layer(channels_last(torch.ones(2, 1, 8, 8)))
    assert found.is_contiguous(memory_format=torch.channels_last) and not found.is_contiguous()
    torch.testing.assert_close(found, expected)
