"""What limits a step of a model in stages: a slow stage, waiting, or messages between stages."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Tutti
from made_up import Times, by_rank, made_up

from tutti.bench.results import Measurement, read_measurements
from tutti.bench.shares import find_stages
from tutti.bench.verdict import judge


def staged(computing: Times, communication: Times, passes: int = 8) -> Measurement:
    names, phases = ("embedding to blocks.1", "blocks.2 to head"), {"compute": None, "exchange": None}
    made = made_up(ranks=2, phases=phases, computing=computing, communication=communication)
    return replace(made, stages=names, passes=passes)


def test_a_model_that_is_not_in_stages_has_none() -> None:
    assert find_stages(made_up(ranks=2, computing=1.0)) is None
    assert "stages" not in judge(made_up(ranks=2, computing=1.0)).content()


def test_a_slow_stage_is_named() -> None:
    verdict = judge(staged(by_rank(0.2, 0.6), 0.1))
    assert verdict.bound == "load imbalance"
    assert verdict.sentence == (
        "bound by load imbalance: stage 1 (blocks.2 to head) computes 600 ms of a step, 1.50 times the mean of 2 "
        "stages; at most 1.5 times as fast; let stages() of the model name smaller modules, or use fewer stages"
    )
    assert verdict.measurements[2:4] == (
        "stage 0 (embedding to blocks.1) computes 200 ms of a step, and waits 500 ms for other stages",
        "stage 1 (blocks.2 to head) computes 600 ms of a step, and waits 100 ms for other stages",
    )


def test_a_bubble_of_few_micro_batches_is_named() -> None:
    verdict = judge(staged(0.4, 0.6, passes=2))
    assert verdict.sentence == (
        "bound by the bubble: stages wait for each other in 60% of a step, 33% at best with 2 micro-batches; "
        "at most 2.5 times as fast; try parallel.schedule=interleaved"
    )
    assert [each.overrides for each in verdict.suggestions][:2] == [
        ("parallel.schedule=interleaved",),
        ("batch.micro=8",),
    ]


def test_messages_between_stages_are_named() -> None:
    verdict = judge(staged(0.4, 0.6))
    assert verdict.sentence.startswith(
        "bound by communication between stages: stages wait for each other in 60% of a step, 11% without it; "
        "at most 2.0 times as fast"
    )


def test_stages_that_compute_most_of_a_step_are_bound_by_compute() -> None:
    assert judge(staged(0.8, 0.2)).bound == "compute"


def test_a_verdict_holds_the_stages() -> None:
    content = json.loads(json.dumps(judge(staged(by_rank(0.2, 0.6), 0.1)).content()))
    assert [each["layers"] for each in content["stages"]] == ["embedding to blocks.1", "blocks.2 to head"]
    assert [each["compute_seconds"] for each in content["stages"]] == pytest.approx([0.2, 0.6])
    assert [each["idle_seconds"] for each in content["stages"]] == pytest.approx([0.5, 0.1])
    assert (content["bubble"], content["ideal_bubble"]) == (pytest.approx(0.3 / 0.7), pytest.approx(1 / 9))


@pytest.mark.ranks
def test_a_recipe_in_stages_is_measured(tutti: Tutti, tmp_path: Path) -> None:
    layers = ("model.name=mlp", "model.hidden=[32,32]", "batch.micro=16", "parallel.stages=2")
    done = tutti("bench", "digits", *layers, "-n", "2", "--seconds", "0.5", "--trials", "2")
    assert done.code == 0, done.all
    (folder,) = (tmp_path / "runs" / "bench" / "digits").iterdir()
    (found,) = read_measurements(folder / "bench.json")
    assert set(found.seconds) == {"read", "whole"} and len(found.stages) == 2 and found.passes == 4
    assert found.parameters == 64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    for stage, layers_of_it in enumerate(found.stages):
        assert f"stage {stage} ({layers_of_it}) computes " in done.out
