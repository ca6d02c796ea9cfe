"""A run is predicted before its start only where memory could matter; what is said of it ends with what to set."""

from collections.abc import Callable

import pytest

from tutti.config.load import change, resolve
from tutti.errors import Cause, cause_of
from tutti.memory import estimate, warning
from tutti.memory.advice import expected_peak, needed_bytes
from tutti.memory.estimate import could_matter, estimate_most
from tutti.memory.prediction import predict
from tutti.memory.warning import advise, foresee

VOLUMES = ["data.source=synthetic", "data.crop=32", "data.box=32", "model.width=8", "model.depth=3"]
VOLUMES += ["batch.global=32", "runtime.device=cpu"]
SetMemory = Callable[[int], None]


@pytest.fixture
def set_memory(monkeypatch: pytest.MonkeyPatch) -> SetMemory:
    def set_to(memory: int) -> None:
        for module in (estimate, warning):
            monkeypatch.setattr(module, "device_memory", lambda device, ranks=1: memory)
        monkeypatch.setattr(warning, "memory_limit", lambda ranks=1: memory)

    return set_to


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("digits", []),
        ("digits/mlp", []),
        ("mnist", []),
        ("cifar10/resnet_small", ["batch.global=64"]),
        ("imagenet/resnet50", ["batch.global=8"]),
        ("nbody", ["data.crop=64", "batch.global=2"]),
        ("nbody", [*VOLUMES, "parallel.recompute=layers"]),
    ],
)
def test_the_estimate_is_above_the_prediction(recipe: str, words: list[str]) -> None:
    config = resolve(recipe, [*words, "runtime.device=cpu"]).config
    assert estimate_most(config, 1) > predict(config, 1, "cpu").peak_bytes


def test_small_runs_are_not_predicted(set_memory: SetMemory) -> None:
    set_memory(4 << 30)
    assert not could_matter(resolve("digits", ["runtime.device=cpu"]).config, 2, 2)
    assert could_matter(resolve("nbody", ["runtime.device=cpu", "data.source=synthetic"]).config, 1, 1)


@pytest.mark.parametrize(
    "words",
    [["model.name=own:Net"], ["data.name=own:Data"], ["framework=keras", "batch.micro=null"], ["batch.global=2000"]],
)
def test_the_code_of_users_and_what_is_wrong_are_left_to_ranks(set_memory: SetMemory, words: list[str]) -> None:
    set_memory(1 << 20)
    assert not could_matter(resolve("digits", ["runtime.device=cpu", *words]).config, 1, 1)


def test_a_warning_ends_with_what_to_set(set_memory: SetMemory) -> None:
    config = resolve("nbody", VOLUMES).config
    prediction = predict(config, 1, "cpu")
    least, most = needed_bytes(prediction)
    set_memory(most)
    found = foresee(config, 1, 1)
    assert found is not None
    assert (found.peak_bytes, found.text) == (expected_peak(prediction), "")
    set_memory(least)
    found = foresee(config, 1, 1)
    assert found is not None
    assert found.text.startswith("warning: this may not fit: a rank needs ")
    assert found.text.endswith("Find out what to set with: tutti plan nbody -n 1")
    set_memory(least - 1)
    found = foresee(config, 1, 1)
    assert found is not None
    first, *lines = found.text.splitlines()
    assert first.startswith("warning: a rank needs ")
    assert ", to which it is limited. " in first
    assert lines[0].startswith("  with precision=bf16: ")
    assert any(" parallel.space=" in line for line in lines)


def test_advice_names_the_first_setting_that_fits(set_memory: SetMemory) -> None:
    config = resolve("nbody", VOLUMES).config
    micro = change(config, ["batch.micro=16"])
    set_memory(needed_bytes(predict(micro, 1, "cpu"))[1])
    found = advise(config, 1, 1)
    assert found is not None
    first, second, *_ = found.text.splitlines()
    assert first.endswith(" Set batch.micro=16.")
    assert second.startswith("  with batch.micro=16: ")
    assert second.endswith(", fits")


def test_where_it_should_have_fitted_nothing_is_promised(set_memory: SetMemory) -> None:
    set_memory(64 << 30)
    found = advise(resolve("nbody", VOLUMES).config, 1, 1)
    assert found is not None
    assert found.text.endswith("That should suffice: set batch.micro=16, or see what else uses the memory.")
    assert "fits" not in found.text


def test_where_nothing_fits_that_is_said(set_memory: SetMemory) -> None:
    set_memory(1 << 20)
    found = advise(resolve("nbody", VOLUMES).config, 1, 1)
    assert found is not None
    assert "No setting surely fits: choose a smaller model" in found.text
    assert ", fits" not in found.text


def test_what_cannot_be_predicted_has_no_advice() -> None:
    assert advise(resolve("digits", ["framework=keras", "batch.micro=null"]).config, 1, 1) is None
    assert foresee(resolve("digits", ["parallel.space=2", "runtime.device=cpu"]).config, 2, 2) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_allocators_are_known_by_their_errors(error: Exception) -> None:
    assert cause_of(error) is Cause.OUT_OF_MEMORY
    assert cause_of(OSError(28, "No space left on device")) is Cause.ERROR
