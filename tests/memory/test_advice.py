"""Only what surely fits is said to fit; settings are tried in the order of their cost."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tutti.config.load import resolve
from tutti.config.run import RunConfig
from tutti.memory.advice import GIB, describe, expected_peak, judge_fit, make_memory_plan, needed_bytes
from tutti.memory.rank import Prediction
from tutti.units import size

KINDS = {"batch": 0, "data": 0}
RECIPE = ["nbody", "data.crop=32", "model.width=8", "model.depth=3", "batch.global=256", "speed.fold=false"]


def with_overrides(*overrides: str) -> Callable[[Sequence[str]], RunConfig]:
    recipe, *others = (*RECIPE, *overrides)
    return lambda more: resolve(recipe, [*others, *more]).config


def prediction(peak_gib: float, device: str = "cuda") -> Prediction:
    return Prediction(device, 1, 8, 8, int(peak_gib * GIB), "backward", KINDS, 0)


@pytest.mark.parametrize(
    ("peak", "memory", "verdict"), [(10, 16, "fits"), (10, 14, "may not fit"), (10, 10.2, "does not fit")]
)
def test_a_verdict_leaves_room_for_the_allocator_and_the_context(peak: float, memory: float, verdict: str) -> None:
    assert judge_fit(prediction(peak), int(memory * GIB)) == verdict


def test_what_was_measured_on_a_gpu_is_never_said_to_fit_in_less() -> None:
    # MiB predicted, and in use on an H200: ResNet-50 of 32 and 128 images, the U-Net of 64 crops; float32 and bf16.
    for predicted, in_use in ((2948, 4914), (10867, 13783), (1694, 2633), (5791, 7055), (7647, 10743), (5068, 6641)):
        assert needed_bytes(prediction(predicted / 1024))[1] >= in_use << 20


def test_a_box_on_the_gpu_has_no_share_in_the_overhead_of_the_allocator() -> None:
    box = 10 * GIB
    with_box = replace(prediction(10 + 2), kinds=KINDS | {"data": box})
    assert needed_bytes(with_box) == tuple(each + box for each in needed_bytes(prediction(2)))


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    resolve_with = with_overrides("data.prefetch=0")
    whole = make_memory_plan(resolve_with, 1, "cuda", None).prediction
    memory = (needed_bytes(whole)[1] + needed_bytes(prediction(0))[1]) // 2
    found = make_memory_plan(resolve_with, 1, "cuda", memory)
    assert found.verdict != "fits"
    micro = found.largest_micro
    assert micro is not None and 1 <= micro < whole.micro_batch
    assert [trial.settings for trial in found.trials][:2] == [(f"batch.micro={micro}",), ("precision=bf16",)]
    assert found.trials[0].fits
    larger = make_memory_plan(with_overrides("data.prefetch=0", f"batch.micro={2 * micro}"), 1, "cuda", memory)
    assert larger.verdict != "fits"
    assert describe(found, size)[0].startswith(f"with batch.micro={micro}: ")
    assert describe(found, size)[0].endswith(", fits")


def test_a_batch_that_fits_may_be_larger() -> None:
    found = make_memory_plan(with_overrides(), 2, "cuda", 8 * GIB)
    assert found.verdict == "fits"
    assert found.trials == ()
    assert found.largest_micro is not None and found.largest_micro > found.prediction.per_rank_batch


def test_settings_are_combined_where_none_of_them_suffices() -> None:
    found = make_memory_plan(with_overrides(), 2, "cuda", (5 * GIB) // 4 + (1 << 20))
    assert found.verdict == "does not fit"
    last = found.trials[-1]
    assert last.settings[:3] == ("batch.micro=1", "precision=bf16", "parallel.shard=all")
    assert not last.fits


def test_without_a_memory_there_is_no_verdict() -> None:
    found = make_memory_plan(with_overrides(), 1, "cuda", None)
    assert (found.verdict, found.largest_micro, found.trials) == (None, None, ())


def test_samples_are_split_in_space_last_over_as_few_ranks_as_suffice() -> None:
    resolve_with = with_overrides("data.source=synthetic", "data.box=32", "batch.micro=1", "batch.global=4")
    whole = make_memory_plan(resolve_with, 4, "cpu", None).prediction
    split = make_memory_plan(
        with_overrides("data.source=synthetic", "data.box=32", "batch.micro=1", "batch.global=4", "parallel.space=2"),
        4,
        "cpu",
        None,
    ).prediction
    memory = needed_bytes(split)[1]
    assert memory < needed_bytes(whole)[1]
    found = make_memory_plan(resolve_with, 4, "cpu", memory)
    assert found.trials[-1].settings == ("parallel.space=2",)
    assert found.trials[-1].fits


def test_one_rank_is_told_how_many_would_share_its_samples() -> None:
    resolve_with = with_overrides("data.source=synthetic", "data.box=32", "batch.global=1", "precision=bf16")
    needed = needed_bytes(make_memory_plan(resolve_with, 1, "cpu", None).prediction)[1]
    asked: list[int] = []

    def memory_of(ranks: int) -> int:
        asked.append(ranks)
        return needed if ranks == 4 else needed // 8

    found = make_memory_plan(resolve_with, 1, "cpu", needed - 1, memory_of)
    assert found.trials[-1].settings == ("-n 4", "parallel.space=4")
    assert found.trials[-1].fits
    assert asked == [2, 4]
    assert describe(found, size)[-1].startswith("with -n 4 parallel.space=4: ")


def test_a_model_that_needs_whole_samples_is_not_offered_parts_of_them() -> None:
    found = make_memory_plan(lambda more: resolve("digits", ["batch.global=32", *more]).config, 2, "cpu", 1 << 20)
    assert not any("parallel.space" in setting for trial in found.trials for setting in trial.settings)


def test_what_is_measured_on_a_cpu_is_the_process() -> None:
    assert expected_peak(prediction(1)) == GIB
    assert expected_peak(prediction(1, "cpu")) == needed_bytes(prediction(1, "cpu"))[0]
