"""Settings that a framework does not have are refused before anything starts, with those it has."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Tutti, command

from tutti.config import framework
from tutti.config.framework import check_installed
from tutti.config.load import load
from tutti.errors import ConfigError


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        (
            "mnist",
            ["framework=kears"],
            ["framework='kears'", "'torch', 'keras' or 'tensorflow'", "Did you mean 'keras'?"],
        ),
        ("mnist", ["framework=keras", "backend=theano"], ["backend='theano'", "'tensorflow', 'torch' or 'jax'"]),
        ("mnist", ["backend=jax"], ["backend='jax' with framework=torch", "Set framework=keras"]),
        (
            "mnist",
            ["optim.name=keras.optimizers:RMSprop", "optim.lr=1e-3"],
            ["'keras.optimizers:RMSprop' with framework=torch: expected an optimizer of torch", "set framework=keras"],
        ),
        (
            "mnist/keras",
            ["optim.name=lars", "optim.lr=1e-3"],
            ["expected sgd, adam, adamw. Choose one of them, or one of Keras as keras.optimizers:RMSprop, or set"],
        ),
        ("mnist", ["framework=tensorflow", "backend=jax"], ["backend='jax' with framework=tensorflow"]),
        (
            "nbody",
            ["framework=keras"],
            ["data.name='nbody' does not exist in framework=keras", "digits, synthetic, mnist"],
        ),
        ("cifar10/fast", ["framework=keras"], ["model.name='cifar_fast' does not exist", "small_cnn, mnist_torch"]),
        (
            "mnist",
            ["framework=keras", "model.name=own:net"],
            ["model.name='own:net' does not exist in framework=keras"],
        ),
        ("mnist", ["framework=keras", "loss.name=mse"], ["loss.name='mse' does not exist", "expected cross_entropy"]),
        ("mnist", ["framework=keras", "metrics=['own:f1']"], ["'own:f1' does not exist", "accuracy, top5"]),
        ("digits", ["framework=keras"], ["batch.micro=16 with framework=keras", "Set batch.micro=null"]),
        ("mnist", ["framework=keras", "speed.compile=true"], ["speed.compile=True", "Set speed.compile=false"]),
        ("mnist", ["framework=keras", "speed.channels_last=false"], ["speed.channels_last=False"]),
        ("mnist", ["framework=tensorflow", "ddp.bucket_mb=4"], ["ddp.bucket_mb=4.0", "Set ddp.bucket_mb=null"]),
        ("mnist", ["log.profile=[2, 4]"], ["log.profile=[2, 4] with framework=torch", "Set framework=tensorflow"]),
        ("mnist", ["framework=tensorflow", "log.profile=[4, 2]"], ["log.profile as [FIRST, LAST]"]),
        ("mnist", ["framework=keras", "backend=jax", "log.profile=[2, 4]"], ["with backend=jax: the profiler"]),
    ],
)
def test_what_is_not_there_is_named_with_what_is(recipe: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(recipe, *overrides)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "recipe",
    ["mnist", "mnist/keras", "cifar10/cnn", "cifar10/resnet_small", "imagenet/resnet50", "imagenet/resnet34", "hello"],
)
@pytest.mark.parametrize("chosen", ["keras", "tensorflow"])
def test_the_tutorials_recipes_exist_in_keras_and_tensorflow(recipe: str, chosen: str) -> None:
    assert load(recipe, f"framework={chosen}").framework == chosen


@pytest.mark.parametrize(
    ("overrides", "package", "line"),
    [
        (["framework=keras"], "keras", "pip install 'tutti-train[tensorflow]'"),
        (["framework=keras"], "tensorflow", "pip install 'tutti-train[tensorflow]'"),
        (["framework=keras", "backend=torch"], "keras", "pip install 'tutti-train[keras]'"),
        (["framework=tensorflow"], "tensorflow", "pip install 'tutti-train[tensorflow]'"),
        (["framework=keras", "backend=jax"], "jax", "pip install 'tutti-train[keras]' jax"),
    ],
)
def test_a_missing_package_is_an_error_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], package: str, line: str
) -> None:
    def find(name: str) -> Any:
        return None if name == package else importlib.util.find_spec("json")

    monkeypatch.setattr(framework, "find_spec", find)
    with pytest.raises(ConfigError) as error:
        check_installed(load("mnist", *overrides))
    assert f"needs the package {package}" in str(error.value)
    assert str(error.value).endswith(f"Install it: {line}")


@pytest.mark.system
def test_a_recipe_in_keras_is_read_without_any_framework(tmp_path: Path) -> None:
    program = """
import sys
from tutti.config.load import load
load("mnist", "framework=keras", "backend=jax")
print({"torch", "tensorflow", "keras", "jax"} & set(sys.modules))
"""
    done = command(sys.executable, "-c", program, cwd=tmp_path)
    assert done.out == "set()\n", done.all


@pytest.mark.system
def test_list_says_what_exists_in_torch_only(tutti: Tutti) -> None:
    lines = tutti("list").out.splitlines()
    assert any(line.startswith("  unet3d") and line.endswith("(torch only)") for line in lines)
    assert any(line.startswith("  resnet50 ") and not line.endswith("(torch only)") for line in lines)
    assert any(line.split()[:1] == ["keras"] for line in lines)


@pytest.mark.system
@pytest.mark.slow
def test_torch_has_optimizers_after_a_keras_model_was_opened() -> None:
    """Triton, which torch loads for its first optimizer, ends a process that has loaded TensorFlow before."""
    code = (
        "from tutti.frameworks.machine import quiet_import\n"
        "with quiet_import():\n    import keras\n"
        "import torch\nprint(keras.backend.backend(), torch.optim.SGD([torch.ones(2)], 0.1).defaults['lr'])\n"
    )
    done = command(sys.executable, "-c", code, cwd=REPOSITORY, KERAS_BACKEND="tensorflow")
    assert (done.code, done.out) == (0, "tensorflow 0.1\n"), done.all
