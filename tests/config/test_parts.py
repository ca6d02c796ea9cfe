"""Parts by name: found, called with the recipe's options, and explained when either fails."""

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from tutti.config import parts
from tutti.config.load import load
from tutti.config.options import locate
from tutti.config.schema import ScheduleConfig
from tutti.errors import ConfigError, DataError

_numbers = itertools.count()
BUILT_IN = [(section, part) for section in parts.SECTIONS for part in parts.parts_of(section)]
OFFERED: dict[str, dict[str, Any]] = {
    "model": {"input_shape": (1, 28, 28), "num_classes": 10},
    "data": {"split": "train", "device": torch.device("cpu"), "local_ranks": 1, "precision": "fp32"},
    "optim": {"params": [torch.nn.Parameter(torch.zeros(1))], "others": None},
    "loss": {},
}
SWITCHED = {"model": {"fold"}}  # attributes that a switch of `speed` sets once the part is built
Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a user's module and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str) -> str:
        name = f"users_module_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return make


def refusal(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


def build(part: parts.PartOptions, section: str) -> Any:
    return parts.call(part.locate(), section, part.options(), **OFFERED[section])


@pytest.mark.parametrize(("section", "part"), BUILT_IN, ids=lambda value: getattr(value, "__name__", value))
def test_every_built_in_part_takes_the_options_of_its_schema(section: str, part: type[parts.PartOptions]) -> None:
    options = part(**({"lr": 0.1} if section == "optim" else {})).options()
    target = locate(part.target)
    parameters = inspect.signature(target).parameters
    assert options.keys() <= parameters.keys()
    if target.__module__.startswith("tutti."):
        assert parameters.keys() - OFFERED[section].keys() - SWITCHED.get(section, set()) == options.keys()
        required = {name for name, field in part.model_fields.items() if field.is_required()}
        defaults = {name: value for name, value in options.items() if name not in required}
        assert {name: parameters[name].default for name in defaults} == defaults


@pytest.mark.parametrize(("section", "part"), BUILT_IN, ids=lambda value: getattr(value, "__name__", value))
def test_every_built_in_part_is_chosen_by_its_name(section: str, part: type[parts.PartOptions]) -> None:
    name = part.model_fields["name"].default
    assert get_args(part.model_fields["name"].annotation) == (name,)
    extra = ["optim.lr=0.1"] if section == "optim" else []
    chosen = getattr(load("digits", f"{section}.name={name}", *extra), section)
    assert type(chosen) is part
    assert part.__doc__ and part.__doc__ != parts.PartOptions.__doc__


@pytest.mark.parametrize(
    ("section", "options", "kind"),
    [
        ("model", {"name": "mlp", "hidden": [3], "dropout": 0.1, "batch_norm": True}, "tutti.models.small:Mlp"),
        ("model", {"name": "small_cnn", "width": 2}, "tutti.models.small:SmallCnn"),
        ("model", {"name": "mnist_torch"}, "tutti.models.small:MnistTorch"),
        ("model", {"name": "mnist_keras"}, "tutti.models.small:MnistKeras"),
        ("model", {"name": "cnn", "width": 2}, "tutti.models.cifar:Cnn"),
        ("model", {"name": "alexnet_small", "dense": 8}, "tutti.models.cifar:AlexnetSmall"),
        ("model", {"name": "cifar_fast", "widths": [4, 8, 8], "views": 2}, "tutti.models.cifar_fast:CifarFast"),
        ("model", {"name": "resnet_small"}, "tutti.models.resnet:ResNetSmall"),
        ("model", {"name": "resnet18", "stem": "small"}, "tutti.models.resnet:ResNet"),
        ("model", {"name": "vit", "width": 8, "heads": 2, "depth": 1}, "tutti.models.transformer:ViT"),
        ("data", {"name": "text", "characters": 2000}, "tutti.data.text:TextWindows"),
        ("data", {"name": "nbody", "source": "synthetic", "box": 16, "crop": 8}, "tutti.data.nbody.dataset:NbodyCrops"),
        ("data", {"name": "synthetic", "shape": [2], "train": 6}, "tutti.data.dataset:ArrayDataset"),
        ("data", {"name": "digits", "shift": 1}, "tutti.data.dataset:ArrayDataset"),
        ("optim", {"name": "sgd", "lr": 0.1, "clip_norm": 1.0}, "torch.optim:SGD"),
        ("optim", {"name": "adam", "lr": 0.1}, "torch.optim:Adam"),
        ("optim", {"name": "adamw", "lr": 0.1}, "torch.optim:AdamW"),
        ("loss", {"name": "cross_entropy", "label_smoothing": 0.1}, "tutti.train.metrics:CrossEntropy"),
        ("loss", {"name": "mse"}, "torch.nn:MSELoss"),
        ("loss", {"name": "l1"}, "tutti.train.metrics:L1Loss"),
    ],
)
def test_a_built_in_part_is_built_from_a_recipe(section: str, options: dict[str, Any], kind: str) -> None:
    part = getattr(load("digits", f"{section}={options}"), section)
    assert type(build(part, section)) is locate(kind)


def test_a_dataset_promises_the_training_samples_that_it_has() -> None:
    boxes = parts.NbodyOptions(source="synthetic", box=16, crop=8, train_samples=7)
    for part in (
        parts.DigitsOptions(),
        parts.SyntheticOptions(shape=(2,), train=6),
        parts.TextOptions(context=7),
        boxes,
    ):
        assert part.train_samples() == len(build(part, "data"))
    assert parts.UserDatasetOptions(name="a:b").train_samples() is None


def test_options_for_the_loader_and_the_loop_are_not_given_to_the_part() -> None:
    data = parts.DigitsOptions(workers=2, prefetch=1, shuffle="blocks", shuffle_block=9, shuffle_window=2, shift=3)
    assert data.options() == {"shift": 3}
    assert parts.SgdOptions(lr=0.1, clip_norm=1.0).options().keys() == {"lr", "momentum", "weight_decay", "nesterov"}


def test_the_options_of_a_part_of_ones_own_are_passed_as_they_are(module: Module) -> None:
    name = module("def make(split, **options):\n    return split, options\n")
    config = load("digits", f"data={{name: '{name}:make', workers: 2, path: here, deep: {{er: [1]}}}}")
    assert isinstance(config.data, parts.UserDatasetOptions)
    assert build(config.data, "data") == ("train", {"path": "here", "deep": {"er": [1]}})


def test_every_metric_and_decay_has_an_object_or_a_rule_behind_its_name() -> None:
    for target, summary in parts.METRICS.values():
        assert callable(locate(target)) and summary
    assert ScheduleConfig.model_fields["decay"].annotation == Literal[tuple(parts.DECAYS)]


def test_an_object_is_found_by_module_and_path(module: Module) -> None:
    name = module("class Outer:\n    class Inner:\n        pass\n")
    assert locate(f"{name}:Outer.Inner").__qualname__ == "Outer.Inner"
    assert locate("json:JSONDecoder.decode").__name__ == "decode"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ValueError('no luck today')", "ValueError: no luck today"),
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("def broken(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_does_not_import_shows_its_own_error(module: Module, text: str, error: str) -> None:
    name = module(text)
    message = refusal(locate, f"{name}:Net")
    assert message.startswith(f"'{name}:Net': importing '{name}' failed with {error}")
    assert message.endswith("Check the name, and that the module is on the Python path (PYTHONPATH, or installed).")


def test_a_module_that_is_not_there_is_named() -> None:
    message = refusal(locate, "no_such_module_here:Net")
    assert "failed with ModuleNotFoundError: No module named 'no_such_module_here'" in message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Nett", "has no 'Nett'. Did you mean 'Net'?"),
        ("Net.forwad", "has no 'forwad'. Did you mean 'forward'?"),
        ("zzz", "has no 'zzz'."),
        ("size", "is a int: expected something to call, a class or a function."),
        ("size.Nett", "has no 'Nett'"),
        ("", "has no ''."),
    ],
)
def test_an_object_that_is_not_there_is_refused_with_the_nearest(module: Module, path: str, message: str) -> None:
    name = module("class Net:\n    def forward(self): ...\n\nsize = 3\n_Nett_ = 4\n")
    found = refusal(locate, f"{name}:{path}")
    assert found.startswith(f"'{name}:{path}'")
    assert message in found


def takes_two(width: int, depth: int = 2) -> tuple[int, int]:
    return width, depth


def takes_any(width: int, **options: Any) -> tuple[int, dict[str, Any]]:
    return width, options


def test_a_part_gets_its_options_and_of_the_offered_values_those_it_has_parameters_for() -> None:
    assert parts.call(takes_two, "model", {"depth": 3}, width=5, num_classes=10) == (5, 3)
    assert parts.call(takes_two, "model", {"width": 1}, width=5) == (1, 2)
    assert parts.call(takes_any, "model", {"depth": 3}, width=5, num_classes=10) == (5, {"depth": 3})


def test_a_compiled_callable_without_a_signature_gets_its_options() -> None:
    def compiled(**options: Any) -> dict[str, Any]:
        return options

    compiled.__signature__ = object()  # type: ignore[attr-defined]  # inspect cannot read it, as with many of C's
    assert parts.call(compiled, "model", {"a": 1}, b=2) == {"a": 1}


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (takes_two, {"width": 1, "depht": 2}, "model.depht: takes_two takes no such option. Did you mean 'depth'?"),
        (takes_two, {"width": 1, "zzz": 2}, "model.zzz: takes_two takes no such option."),
        (takes_two, {"depth": 2}, "model: takes_two needs the option 'width'. Set model.width=..."),
        (takes_any, {"depth": 2}, "model: takes_any needs the option 'width'. Set model.width=..."),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Any, options: dict[str, Any], message: str) -> None:
    assert refusal(parts.call, target, "model", options) == message


@pytest.mark.parametrize("text", ["functools.partial(Net, width=3)", "Net(3)"])
def test_a_callable_without_a_name_is_refused_with_a_message_too(module: Module, text: str) -> None:
    name = module(
        "import functools\n\nclass Net:\n    def __init__(self, width): ...\n    def __call__(self, width): ...\n"
        f"\nmake = {text}\n"
    )
    assert "model.widht" in refusal(parts.call, locate(f"{name}:make"), "model", {"widht": 2})


def test_an_error_inside_a_part_is_shown_with_its_place(module: Module, tmp_path: Path) -> None:
    name = module("class Net:\n    def __init__(self, width):\n        raise RuntimeError(f'bad width {width}')\n")
    message = refusal(parts.call, locate(f"{name}:Net"), "model", {"width": 3})
    assert message == f"model: Net failed with RuntimeError: bad width 3 ({tmp_path / name}.py, line 3)."


def test_too_little_memory_for_a_part_is_no_fault_of_the_recipe() -> None:
    def fails() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        parts.call(fails, "data", {})


def test_an_error_with_a_message_of_its_own_passes_unchanged() -> None:
    def fails() -> None:
        raise DataError("the file is gone")

    with pytest.raises(DataError, match=r"^the file is gone$"):
        parts.call(fails, "data", {})
