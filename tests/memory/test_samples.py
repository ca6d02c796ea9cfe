"""The memory of samples that stay on a device: boxes, on a GPU as far as data.source puts them there."""

from pathlib import Path

import h5py
import pytest

from tutti.config.load import resolve
from tutti.config.plan import make_plan
from tutti.data.nbody.dataset import GPU_SHARE
from tutti.memory.advice import make_memory_plan
from tutti.memory.rank import DATA
from tutti.memory.samples import describe_samples, resident_bytes

TRAIN, VALID = 48, 32  # cells of a side
CELL = 4 * 4 + 5 * 4  # bytes, in float32
WORDS = ("data.crop=16", "batch.global=8", "model.width=8", "model.depth=3", "speed.fold=false")


@pytest.fixture
def boxes(tmp_path: Path) -> list[str]:
    """Overrides that name two boxes, whose numbers were never written."""
    words = []
    for name, side in (("train", TRAIN), ("valid", VALID)):
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            for field, channels in (("Nbody", 4), ("Hydro", 5)):
                file.create_dataset(field, (channels, side, side, side), "f4")
        words.append(f"data.{name}={path}")
    return [*words, *WORDS]


def found_bytes(words: list[str], device: str = "cuda", memory_bytes: int | None = None) -> int:
    config = resolve("nbody", words).config
    return resident_bytes(config, make_plan(config, 1, 1024), device, memory_bytes)


def test_boxes_on_a_gpu_are_those_that_the_source_puts_there(boxes: list[str]) -> None:
    train, valid = CELL * TRAIN**3, CELL * VALID**3
    assert found_bytes([*boxes, "data.source=device"]) == train + valid
    assert found_bytes([*boxes, "data.source=device"], memory_bytes=1) == train + valid
    assert found_bytes([*boxes, "data.source=memory"]) == found_bytes([*boxes, "data.source=disk"]) == 0
    assert found_bytes(boxes) == train + valid
    assert found_bytes(boxes, memory_bytes=int(train / GPU_SHARE) - 1) == valid
    least = int(max(train / GPU_SHARE, valid / GPU_SHARE + train)) + 1  # the second sees what the first has left
    assert found_bytes(boxes, memory_bytes=least) == train + valid
    assert found_bytes(boxes, memory_bytes=least - 2) in (train, valid)


def test_the_boxes_of_further_validation_sets_are_counted(boxes: list[str]) -> None:
    train, valid = CELL * TRAIN**3, CELL * VALID**3
    words = [*boxes, f"valid.other.valid={boxes[0].split('=')[1]}"]
    assert found_bytes([*words, "data.source=device"]) == 2 * train + valid
    one = found_bytes([*boxes, "data.source=memory"], "cpu") - found_bytes([*boxes, "data.source=disk"], "cpu")
    two = found_bytes([*words, "data.source=memory"], "cpu") - found_bytes([*words, "data.source=disk"], "cpu")
    assert (one, two) == (train + valid, 2 * train + valid)


def test_inputs_of_a_box_on_a_gpu_are_rounded(boxes: list[str]) -> None:
    words = [*boxes, "precision=bf16"]
    assert found_bytes(words) == (4 * 2 + 5 * 4) * (TRAIN**3 + VALID**3)
    assert found_bytes([*words, "data.rounded=false"]) == CELL * (TRAIN**3 + VALID**3)


def test_boxes_in_the_memory_of_a_host_are_counted_whole(boxes: list[str]) -> None:
    kept = found_bytes([*boxes, "data.source=memory"], "cpu") - found_bytes([*boxes, "data.source=disk"], "cpu")
    assert kept == CELL * (TRAIN**3 + VALID**3)


def test_a_box_that_is_missing_is_counted_where_it_will_be_made_and_else_said_to_be_missing(boxes: list[str]) -> None:
    Path(boxes[0].split("=")[1]).unlink()
    note = f"{boxes[0].split('=')[1]} is not here: its memory is not counted"
    assert describe_samples(resolve("nbody", boxes).config).notes == (note,)
    assert found_bytes(boxes) == CELL * VALID**3
    made = [*boxes, "data.make=true", "data.box=64"]
    assert describe_samples(resolve("nbody", made).config).notes == ()
    assert found_bytes(made) == CELL * (64**3 + VALID**3)
    assert describe_samples(resolve("nbody", [*boxes, "data.source=disk"]).config).notes == ()


def test_a_plan_counts_a_box_on_the_gpu_and_offers_to_leave_it_on_the_host(boxes: list[str]) -> None:
    words = [*boxes, "data.prefetch=0"]
    plan = make_memory_plan(lambda more: resolve("nbody", [*words, *more]).config, 1, "cuda", 1 << 30)
    assert plan.prediction.kinds[DATA] == CELL * (TRAIN**3 + VALID**3)
    offered = [trial for trial in plan.trials if trial.settings == ("data.source=memory",)]
    assert [trial.prediction.kinds[DATA] for trial in offered if trial.prediction] == [0]
