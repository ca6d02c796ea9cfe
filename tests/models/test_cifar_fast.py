"""The fast CIFAR-10 network: whitening from the data, identity initialisation, and views in validation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rank_jobs import run_ranks, train
from torch import nn

from tutti.data.cifar10 import cifar10
from tutti.models.cifar_fast import BiasedNorm, CifarFast

COUNT = 200


def images(count: int = 64) -> torch.Tensor:
    """Pictures whose neighbours are alike and whose channels share most of their light, as in photographs."""
    rough = torch.randn(count, 3, 36, 36, generator=torch.Generator().manual_seed(0))
    smooth = F.avg_pool2d(rough, 5, stride=1)
    return 3 * smooth + 4 * smooth.mean(1, keepdim=True) + 2


def small(views: int = 6) -> CifarFast:
    torch.manual_seed(0)
    return CifarFast(widths=(8, 16, 16), views=views)


def spread(model: CifarFast, pictures: torch.Tensor) -> torch.Tensor:
    """The covariance of what leaves the first layer."""
    found = model.whiten(pictures).transpose(0, 1).flatten(1).detach()
    return torch.cov(found)


def test_the_full_network_has_about_two_million_parameters() -> None:
    model = CifarFast()
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 256 * 256 + 256 * 256 + 256 * 256)
    assert sum(p.numel() for p in model.parameters()) == 24 * 12 + 24 + convolutions + 2 * (64 + 512) + 256 * 10
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_adapting_whitens_the_patches_of_the_images() -> None:
    model, pictures = small(), images()
    before = spread(model, pictures)[:12, :12]
    assert (before - before.diag().diag()).abs().max() > 0.1
    model.adapt_to_data(pictures)
    covariance = spread(model, pictures)
    whole, mirror = covariance[:12, :12], covariance[:12, 12:]
    variances = whole.diag()
    assert variances.min() > 0.95 and variances.max() < 1.01, "every component has spread 1"
    assert (whole - variances.diag()).abs().max() < 0.01, "no two go together"
    torch.testing.assert_close(mirror, -whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.whiten.weight[:12], -model.whiten.weight[12:])


def test_images_without_variety_are_adapted_to_as_well() -> None:
    model = small()
    model.adapt_to_data(torch.ones(4, 3, 32, 32))
    assert torch.isfinite(model.whiten.weight).all()
    assert torch.isfinite(model(torch.ones(4, 3, 32, 32))).all()


def test_the_first_layer_is_not_trained_and_all_others_are() -> None:
    model = small()
    model.adapt_to_data(images())
    model(images()).square().mean().backward()
    for name, parameter in model.named_parameters():
        if name == "whiten.weight":
            assert parameter.grad is None and not parameter.requires_grad
        else:
            assert parameter.grad is not None and parameter.grad.any(), name


def test_convolutions_begin_as_identities() -> None:
    for block in small().blocks:
        for layer in (layer for layer in block.modules() if isinstance(layer, nn.Conv2d)):
            pictures = torch.randn(2, layer.in_channels, 5, 5)
            found = layer(pictures)[:, : layer.in_channels]
            torch.testing.assert_close(found, pictures[:, : layer.out_channels])


def test_biases_of_the_norm_move_eightfold() -> None:
    norm, pictures = BiasedNorm(3), torch.randn(4, 3, 5, 5)
    plain = norm(pictures)
    with torch.no_grad():
        norm.shift.add_(0.5)
    torch.testing.assert_close(norm(pictures), plain + 4)
    assert [name for name, _ in norm.named_parameters()] == ["shift"], "there are no scales"


@pytest.mark.parametrize("views", [1, 2, 6])
def test_validation_is_the_mean_over_views(views: int) -> None:
    model, pictures = small(views), images(5)
    model.adapt_to_data(pictures)
    model(pictures)  # statistics of their own
    model.eval()
    moved = F.pad(pictures, (1, 1, 1, 1), mode="reflect")
    down_right, up_left = moved[..., :-2, :-2], moved[..., 2:, 2:]
    seen = {
        1: [(1.0, pictures)],
        2: [(0.5, pictures), (0.5, pictures.flip(-1))],
        6: [
            *[(0.25, pictures), (0.25, pictures.flip(-1))],
            *[(0.125, view) for corner in (down_right, up_left) for view in (corner, corner.flip(-1))],
        ],
    }[views]
    assert torch.equal(down_right[..., 1:, 1:], pictures[..., :-1, :-1])
    one_view = small(1)
    one_view.load_state_dict(model.state_dict())
    one_view.eval()
    expected = sum((weight * one_view(view) for weight, view in seen), torch.zeros(5, 10))
    torch.testing.assert_close(model(pictures), expected)
    if views == 2:
        torch.testing.assert_close(model(pictures.flip(-1)), expected)


def test_training_sees_one_view() -> None:
    assert torch.equal(small(6)(images(5)), small(1)(images(5)))


def write_cifar(folder: Path) -> Path:
    """A small CIFAR-10 in its binary form: bright and dark images for even and odd classes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = np.arange(COUNT // 5) % 10
        pixels = rng.integers(0, 128, (len(labels), 3072)) + 120 * (labels % 2)[:, None]
        records = np.concatenate([labels[:, None], pixels], 1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


@pytest.mark.ranks
def test_a_run_adapts_the_model_to_its_training_images_on_every_rank(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "cifar10")
    values: dict[str, Any] = {
        "recipe": "fast",
        "data": {"name": "cifar10", "path": str(folder), "shift": 2, "flip": "alternate", "fill": "reflect"},
        "model": {"name": "cifar_fast", "widths": [8, 16, 16]},
        "loss": {"name": "cross_entropy", "label_smoothing": 0.2},
        "optim": {"name": "sgd", "lr": 0.5, "momentum": 0.85, "nesterov": True, "weight_decay": 0.0013},
        "batch": {"global": 40, "eval": 20},
        "epochs": 1,
        "checkpoint": {"every_epochs": None},
        "log": {"tensorboard": False},
        "out": str(tmp_path / "runs"),
    }
    one, other = run_ranks(2, train, values)
    assert one["weights"] == other["weights"]
    assert one["results"]["valid_loss"] > 0
    expected = small()
    data = cifar10("train", str(folder))
    expected.adapt_to_data(data.batch(torch.arange(COUNT), None)[0])
    place = 0
    for name, value in expected.state_dict().items():
        if name == "whiten.weight":
            found = torch.tensor(one["weights"][place : place + value.numel()])
            torch.testing.assert_close(found, value.flatten(), rtol=1e-4, atol=1e-4)
            break
        place += value.numel()
    else:
        pytest.fail("there is no first layer")
