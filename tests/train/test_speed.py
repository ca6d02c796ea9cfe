"""The switches of `speed`: where they apply, that they reach the model, and that they change no result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_jobs import run_ranks, train
from torch import nn

from tutti.config.load import resolve, resolve_values
from tutti.config.recipes import parse_yaml
from tutti.config.schema import SpeedConfig, Where
from tutti.data.dataset import ArrayDataset
from tutti.errors import ConfigError
from tutti.models.unet3d import UNet3d
from tutti.ranks.device import applies
from tutti.ranks.environments import discover
from tutti.train.learner import Pass
from tutti.train.torch import Objects, TorchParts, build_parts, fit

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
VALUES: dict[str, Any] = {
    "recipe": "small",
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32]},
    "optim": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "batch": {"global": 120, "eval": 100},
    "epochs": 1,
    "checkpoint": {"every_epochs": None},
    "log": {"every_steps": 4, "tensorboard": False},
}
VOLUMES: dict[str, Any] = {
    "data": {"name": "nbody", "source": "synthetic", "box": 16, "crop": 8, "train_samples": 4, "valid_samples": 2},
    "model": {"name": "unet3d", "width": 2, "depth": 2},
    "loss": {"name": "l1"},
    "metrics": [],
    "batch": {"global": 2},
}


def trained(speed: dict[str, Any], out: Path, ranks: int = 1, **values: Any) -> dict[str, Any]:
    return run_ranks(ranks, train, VALUES | values | {"speed": speed, "out": str(out)})[0]


def built(speed: dict[str, Any], objects: Objects | None = None, **values: Any) -> TorchParts:
    return build_parts(resolve_values(VALUES | values | {"speed": speed}), objects or Objects(), discover({}), CPU)


@pytest.mark.parametrize(
    ("where", "on_cpu", "on_gpu"), [(True, True, True), (False, False, False), ("gpu", False, True)]
)
def test_a_switch_is_on_everywhere_nowhere_or_on_gpus(where: Where, on_cpu: bool, on_gpu: bool) -> None:
    assert applies(where, CPU) is on_cpu
    assert applies(where, GPU) is on_gpu


def test_what_costs_nothing_is_on_where_there_is_a_gpu() -> None:
    assert SpeedConfig() == SpeedConfig(channels_last="gpu", compile=False, graphs=False, fold="gpu")
    assert resolve("nbody/short_opt").config.speed.compile == "gpu"


@pytest.mark.parametrize("switch", list(SpeedConfig.model_fields))
@pytest.mark.parametrize("value", ["cuda", "2"])
def test_another_value_is_refused_in_one_line(switch: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("digits", [f"speed.{switch}={value}"])
    given = value if value == "2" else repr(value)
    message = str(caught.value)
    assert message.lower().startswith(f"speed.{switch}={given} (command line): expected true, false or 'gpu'."), message
    assert "\n" not in message


def test_an_unknown_switch_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("digits", ["speed.channel_last=true"])
    assert str(caught.value) == (
        "unknown key 'speed.channel_last' (command line): expected one of channels_last, compile, graphs, fold. "
        "Did you mean 'channels_last'?"
    )


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False), ("gpu", "gpu")])
def test_a_value_comes_back_from_the_record_as_it_was(value: str, expected: Where) -> None:
    config = resolve("digits", [f"speed.compile={value}"]).config
    assert config.speed.compile == expected
    assert resolve_values(parse_yaml(config.as_yaml(), "here")).speed == config.speed


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), ("gpu", False)])
def test_folding_reaches_the_model(value: Where, expected: bool) -> None:
    model = built({"fold": value}, **VOLUMES).model
    assert isinstance(model, UNet3d) and model.fold is expected


def test_a_model_of_ones_own_may_have_a_layer_named_fold() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fold = nn.Linear(2, 2)

    data = ArrayDataset(torch.zeros(200, 2), torch.zeros(200, 2))
    model = built({"fold": True}, Objects(model=Folding(), train_data=data)).model
    assert isinstance(model.fold, nn.Linear)


@pytest.mark.parametrize("adapts", [True, False])
def test_a_model_that_adapts_needs_a_dataset_of_whole_batches(adapts: bool) -> None:
    class Adapting(nn.Linear):
        seen: torch.Tensor | None = None

        def adapt_to_data(self, inputs: torch.Tensor) -> None:
            self.seen = inputs

    inputs = torch.arange(300.0).view(150, 2)
    pairs = list(zip(inputs, inputs, strict=True))
    objects = Objects(model=Adapting(2, 2), train_data=ArrayDataset(inputs, inputs) if adapts else pairs)
    if adapts:
        seen = built({}, objects).model.seen
        assert isinstance(seen, torch.Tensor) and torch.equal(seen, inputs)
    else:
        with pytest.raises(ConfigError, match="Adapting adapts to training samples before the first step"):
            built({}, objects)


def fit_small(model: nn.Module, speed: dict[str, Any], out: Path) -> None:
    data = ArrayDataset(torch.randn(4, 2, 4, 4), torch.arange(4) % 2)
    values = {key: VALUES[key] for key in ("optim", "epochs", "checkpoint", "log")}
    fit(model, data, data, **values, batch={"global": 2, "eval": 3}, speed=speed, out=str(out))


def small_cnn(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))


@pytest.mark.system
@pytest.mark.parametrize(("value", "innermost"), [(True, True), (False, False), ("gpu", False)])
def test_the_layout_reaches_weights_and_inputs(tmp_path: Path, value: Where, innermost: bool) -> None:
    seen: list[bool] = []

    class Watching(nn.Sequential):
        def forward(self, images: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(images.is_contiguous(memory_format=torch.channels_last))
            return super().forward(images)

    model = small_cnn(Watching)
    fit_small(model, {"channels_last": value}, tmp_path)
    assert set(seen) == {innermost} and len(seen) > 4, "training and validation"
    assert next(model.parameters()).is_contiguous(memory_format=torch.channels_last) is innermost


@pytest.mark.system
@pytest.mark.parametrize(
    ("speed", "mode"),
    [
        ({"compile": True}, [None]),
        ({"compile": True, "graphs": True}, ["reduce-overhead"]),
        ({"compile": True, "graphs": "gpu"}, [None]),
        ({"compile": "gpu"}, []),
        ({"graphs": True}, []),
    ],
)
def test_model_and_loss_are_compiled_where_the_switch_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: dict[str, Any], mode: list[str | None]
) -> None:
    compiled: list[tuple[type, dict[str, Any]]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((type(self), options)))
    fit_small(small_cnn(), speed, tmp_path)
    assert compiled == [(Pass, {"dynamic": False, "mode": each}) for each in mode]


@pytest.mark.ranks
def test_layout_and_folding_learn_the_same(tmp_path: Path) -> None:
    plain = trained({"channels_last": False, "fold": False}, tmp_path / "plain", ranks=2, **VOLUMES)["weights"]
    for place, speed in enumerate(({"channels_last": True, "fold": False}, {"channels_last": True, "fold": True})):
        switched = trained(speed, tmp_path / str(place), ranks=2, **VOLUMES)["weights"]
        np.testing.assert_allclose(switched, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_compiled_run_learns_the_same(tmp_path: Path) -> None:
    """12 steps; compiled code adds in another order."""
    plain, compiled = (trained({"compile": value}, tmp_path / str(value)) for value in (False, True))
    np.testing.assert_allclose(compiled["weights"], plain["weights"], rtol=1e-3, atol=1e-5)
    assert compiled["results"]["valid_loss"] == pytest.approx(plain["results"]["valid_loss"], rel=1e-4)
    assert plain["results"]["valid_accuracy"] > 0.5, "there was something to learn"
