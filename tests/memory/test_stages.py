"""The memory of a pipeline is that of its largest stage, with as many micro-batches in flight as its schedule has."""

from typing import Any

import pytest

from tutti.config.load import resolve, resolve_values
from tutti.errors import ConfigError
from tutti.memory.prediction import predict
from tutti.memory.rank import Prediction
from tutti.memory.stages import plan_actions
from tutti.memory.tracking import ACTIVATIONS, PARAMETERS

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def in_flight(schedule: str, stage: int, stages: int, passes: int) -> int:
    """The most micro-batches whose activations a rank holds at a time, each in as many parts as it has."""
    most, held = 0, set()
    for kind, part, number in plan_actions(schedule, stage, stages, passes):
        assert part % stages == stage
        if kind == "forward":
            assert (part, number) not in held
            held.add((part, number))
        else:
            held.remove((part, number))
        most = max(most, len(held))
    assert not held
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "passes"), [(2, 2), (2, 8), (4, 8)])
def test_every_part_has_one_forward_and_one_backward_pass_of_each_micro_batch(
    schedule: str, stages: int, passes: int
) -> None:
    for stage in range(stages):
        actions = list(plan_actions(schedule, stage, stages, passes))
        assert len(actions) == len(set(actions)) == passes * (4 if schedule in ("interleaved", "zero_bubble") else 2)
        in_flight(schedule, stage, stages, passes)


def test_schedules_differ_by_what_is_in_flight() -> None:
    assert [in_flight("gpipe", stage, 4, 8) for stage in range(4)] == [8, 8, 8, 8]
    assert [in_flight("1f1b", stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("interleaved", stage, 4, 8) for stage in range(4)] == [11, 9, 7, 5]  # of half the layers each
    assert in_flight("1f1b", 0, 4, 2) == 2


def predict_chain(ranks: int, stages: int, schedule: str = "1f1b", **more: Any) -> Prediction:
    values: dict[str, Any] = {
        "data": {"name": "nbody", "source": "synthetic", "crop": 16, "box": 16},
        "model": {"name": "unet3d", "width": 16, "depth": 4},
        "loss": {"name": "l1"},
        "metrics": [],
        "optim": {"name": "adam", "lr": 0.1, "clip_norm": 1.0},
        "batch": {"per_rank": 16, "micro": 2},
        "epochs": 1,
        "parallel": {"stages": stages, "schedule": schedule},
    }
    return predict(resolve_values(values | more), ranks, "cpu")


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_a_stage_holds_its_layers_and_what_is_in_flight(schedule: str) -> None:
    whole, found = predict_chain(1, 1), predict_chain(2, 2, schedule)
    assert 0 < found.kinds[PARAMETERS] < whole.kinds[PARAMETERS]
    assert "of 2 needs most. Stages are cut by floating-point operations here" in found.notes[0]
    assert (found.micro_batch, found.per_rank_batch) == (2, 16)
    assert found.kinds[ACTIVATIONS] > 0


def test_gpipe_keeps_all_micro_batches() -> None:
    few, many = (predict_chain(2, 2, schedule).peak_bytes for schedule in ("1f1b", "gpipe"))
    assert many > few


def test_stages_of_several_data_ranks_average_a_copy_of_their_gradients() -> None:
    assert predict_chain(4, 2).peak_bytes >= predict_chain(2, 2).peak_bytes


def test_larger_batches_of_validation_are_counted_and_layers_computed_again() -> None:
    batch = {"per_rank": 4, "micro": 2, "eval": 512}
    assert predict_chain(2, 2, batch=batch).phase == "validation"
    again = predict_chain(2, 2, parallel={"stages": 2, "recompute": "layers"})
    assert again.kinds[ACTIVATIONS] <= predict_chain(2, 2).kinds[ACTIVATIONS]


def test_the_first_rank_holds_the_whole_model_while_it_is_cut() -> None:
    wide = [
        "optim.name=sgd",
        "optim.lr=0.1",
        "optim.weight_decay=0",
        "data.context=8",
        "model.width=512",
        "model.depth=8",
        "batch.global=2",
        "batch.micro=1",
    ]
    whole = predict(resolve("text", wide).config, 1, "cpu")
    found = predict(resolve("text", [*wide, "parallel.stages=2"]).config, 2, "cpu")
    assert found.phase == "cut into stages"
    assert found.kinds[PARAMETERS] == whole.kinds[PARAMETERS]


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.stages=8: UNet3d has 4 modules with weights"):
        predict_chain(8, 8, model={"name": "unet3d", "width": 4, "depth": 2}, batch={"per_rank": 16, "micro": 1})
    images: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "small_cnn"},
        "loss": {"name": "cross_entropy"},
    }
    with pytest.raises(ConfigError, match="expected a model that names its parts"):
        predict_chain(2, 2, **images)
