"""The 3-D U-Net: the tutorial's layers, equal results in both forms, and errors for other volumes."""

import pytest
import torch
from torch import nn

from tutti.errors import ConfigError
from tutti.models.unet3d import UNet3d
from tutti.train.learner import put_channels_last

DOWN = [(4, 64), (64, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
UP = [(512, 512), (1024, 512), (1024, 256), (512, 128), (256, 64), (128, 5)]


def small(fold: bool = False, depth: int = 3, width: int = 4) -> UNet3d:
    torch.manual_seed(0)
    return UNet3d(width=width, depth=depth, fold=fold).double()


def volume(batch: int = 2, side: int = 16) -> torch.Tensor:
    return torch.randn(batch, 4, side, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_full_network_has_the_tutorials_layers() -> None:
    with torch.device("meta"):
        model = UNet3d(input_shape=(4, 64, 64, 64))
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d)]
    assert [(layer.in_channels, layer.out_channels) for layer in layers] == DOWN + UP
    assert [isinstance(layer, nn.Conv3d) for layer in layers] == [True] * 6 + [False] * 6
    assert {(layer.kernel_size, layer.stride, layer.padding) for layer in layers} == {((4,) * 3, (2,) * 3, (1,) * 3)}
    assert sum(parameter.numel() for parameter in model.parameters()) == 116_977_029


def test_weights_begin_small_and_biases_at_zero() -> None:
    for name, parameter in UNet3d(width=16, depth=3).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.002, name


def test_volumes_keep_their_size_and_become_five_fields_between_minus_one_and_one() -> None:
    model = small(depth=2)
    for parameter in model.parameters():
        parameter.data *= 50  # so that the end of the range is reached
    out = model(torch.randn(3, 4, 8, 12, 16, dtype=torch.float64))
    assert out.shape == (3, 5, 8, 12, 16)
    assert -1 <= out.min() < -0.9 and 0.9 < out.max() <= 1


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_folded_layers_give_the_same_outputs_and_gradients(depth: int, layout: torch.memory_format) -> None:
    found = []
    for fold in (False, True):
        model = small(fold, depth)
        if layout is torch.channels_last_3d:
            put_channels_last(model)
        assert model.fold is fold
        for parameter in model.parameters():
            parameter.data *= 5  # at first all outputs are near zero
        inputs = volume().to(memory_format=layout).requires_grad_()
        out = model(inputs)
        (out * volume(side=16)[:, [0, 1, 2, 3, 0]]).sum().backward()
        found.append([out.detach(), inputs.grad, *(parameter.grad for parameter in model.parameters())])
    for plain, folded in zip(*found, strict=True):
        assert plain.abs().max() > 1e-6
        torch.testing.assert_close(folded, plain, rtol=1e-10, atol=1e-12 * float(plain.abs().max()))


def test_a_state_fits_both_forms() -> None:
    plain, folded = small(False), small(True)
    for parameter in folded.parameters():
        parameter.data += 0.1
    state = plain.state_dict()
    assert state.keys() == folded.state_dict().keys()
    folded.load_state_dict(state)
    torch.testing.assert_close(folded(volume()), plain(volume()), rtol=1e-12, atol=1e-14)


def test_every_parameter_gets_a_gradient_in_both_forms() -> None:
    for fold in (False, True):
        model = small(fold)
        model(volume()).square().mean().backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_every_level_reaches_the_output() -> None:
    """Without its skip connection, a level would be seen through the levels below it alone."""
    model = small()
    whole = model(volume())
    for layer in model.downs:
        kept = {name: value.clone() for name, value in layer.state_dict().items()}
        nn.init.zeros_(next(layer.parameters()))
        assert not torch.allclose(model(volume()), whole, rtol=1e-6, atol=0)
        layer.load_state_dict(kept)
    for parameter in model.ups.parameters():  # only the volume that is skipped to the end remains
        nn.init.zeros_(parameter)
    assert not torch.equal(model(volume()), model(volume() + 1))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (4, 28, 28),
            "the data is 4 x 28 x 28: expected volumes, channels x depth x height x width. "
            "Choose a dataset of volumes, such as data.name=nbody, or another model.",
        ),
        ((3, 64, 64, 64), "model.in_channels=4, but the data has 3 channels. Set model.in_channels=3."),
        (
            (4, 64, 48, 64),
            "volumes of 64 x 48 x 64 cells cannot be halved 6 times: expected multiples of 64. "
            "Set data.crop, or a smaller model.depth.",
        ),
        (
            (4, 32, 32, 32),
            "volumes of 32 x 32 x 32 cells cannot be halved 6 times: expected multiples of 64. "
            "Set data.crop, or a smaller model.depth.",
        ),
    ],
)
def test_volumes_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError) as caught:
        UNet3d(input_shape=shape)
    assert str(caught.value) == message


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_inputs_that_were_rounded_before_give_the_same_bits(fold: bool, layout: torch.memory_format) -> None:
    """Datasets may give inputs in the precision of autocast."""
    model, inputs = small(fold).float(), volume().float().to(memory_format=layout)
    if layout is torch.channels_last_3d:
        put_channels_last(model)
    found = []
    for given in (inputs, inputs.bfloat16()):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(given)
        out.float().square().mean().backward()
        found.append([out.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
