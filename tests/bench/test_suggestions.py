"""Suggestions fit the bottleneck of a recipe, and change a setting."""

from pathlib import Path
from typing import Any

import pytest
from made_up import made_up

from tutti.bench import suggestions
from tutti.bench.results import Measurement, Work
from tutti.bench.shares import find_shares
from tutti.bench.suggestions import Suggestion, cpu_has_bf16, suggest
from tutti.config.load import resolve

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def _plain_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "cpu_has_bf16", lambda: False)


def found(bound: str, *settings: str, **values: Any) -> list[Suggestion]:
    """What is suggested for a step that is half reading and half computing."""
    halves: dict[str, Any] = {"data": 0.5, "computing": 0.5}
    measurement = made_up(*settings, **halves | values)
    return suggest(measurement, bound, find_shares(measurement))


def texts(bound: str, *settings: str, **values: Any) -> list[str]:
    return [each.text for each in found(bound, *settings, **values)]


def test_sources_nearer_to_the_device_come_first() -> None:
    nbody = {"recipe": "nbody", "device": "cuda", "sources": ("memory", "device", "disk")}
    assert texts("data loading", "data.source=disk", **nbody)[:2] == ["data.source=device", "data.source=memory"]
    assert texts("data loading", "data.source=memory", **nbody)[:1] == ["data.source=device"]


@pytest.mark.parametrize("source", ["device", "auto", "synthetic"])
def test_a_source_that_is_near_or_was_chosen_stays(source: str) -> None:
    given = texts(
        "data loading", f"data.source={source}", recipe="nbody", device="cuda", sources=("device", "memory", "disk")
    )
    assert not [text for text in given if "source" in text]


def test_sources_that_the_dataset_does_not_offer_are_not_suggested() -> None:
    assert texts("data loading", "data.source=disk", recipe="nbody", sources=("memory",))[0] == "data.source=memory"


def test_as_many_loader_processes_as_hide_data_loading_come_first() -> None:
    values = {"batches_are_samples": True, "cores": 8, "data": 0.75, "computing": 0.25}
    assert texts("data loading", **values) == [f"data.workers={n}" for n in (4, 8, 16, 2)]


def test_loader_processes_are_counted_from_those_there_are() -> None:
    values = {"batches_are_samples": True, "cores": 8, "data": 0.5, "computing": 0.5}
    assert texts("data loading", "data.workers=4", **values)[:2] == ["data.workers=8", "data.workers=16"]


def test_where_none_is_enough_the_most_come_first() -> None:
    values = {"batches_are_samples": True, "cores": 2, "data": 0.99, "computing": 0.01}
    assert texts("data loading", **values) == ["data.workers=4", "data.workers=2"]


def test_ranks_of_a_host_share_its_cores() -> None:
    given = texts("data loading", batches_are_samples=True, cores=16, local_ranks=4, data=0.9, computing=0.1)
    assert given == ["data.workers=8", "data.workers=4", "data.workers=2"]


def test_fewer_loader_processes_where_they_slow_compute() -> None:
    values = {"batches_are_samples": True, "cores": 2, "phases": {"compute": 0.2, "read": 0.1}}
    given = found("data loading", "data.workers=4", **values)
    assert [each.text for each in given] == ["data.prefetch=2", "data.prefetch=4", "data.workers=2"]
    assert given[2].why == "4 loader processes take cores from compute"


def test_whole_batches_are_prefetched_instead() -> None:
    assert texts("data loading") == ["data.prefetch=2", "data.prefetch=4"]
    assert texts("data loading", "data.prefetch=2") == ["data.prefetch=4"]
    assert texts("data loading", device="cuda") == ["data.prefetch=4"]
    assert texts("data loading", "data.prefetch=4") == []


def test_samples_of_loader_processes_are_prefetched_too() -> None:
    assert "data.prefetch=2" in texts("data loading", "data.workers=2", batches_are_samples=True)


def test_compute_on_a_cpu() -> None:
    assert texts("compute", cores=8, threads=8) == ["speed.channels_last=true", "speed.compile=true"]


def test_compute_on_a_gpu() -> None:
    given = found("compute", device="cuda")
    assert [each.text for each in given] == [
        "precision=bf16",
        "speed.compile=true",
        "speed.compile=true speed.graphs=true",
    ]
    assert [each.changes for each in given] == ["precision", None, None]


def test_what_is_on_already_is_not_suggested() -> None:
    assert texts("compute", "speed.compile=gpu", "precision=bf16", device="cuda") == ["speed.graphs=true"]
    assert texts("compute", "speed.compile=gpu", "speed.graphs=true", "precision=fp16", device="cuda") == []


def test_layouts_are_for_convolutions_and_folds_for_models_that_offer_them() -> None:
    assert "speed.channels_last=true" not in texts("compute", recipe="digits/mlp")
    assert "speed.fold=true" in texts("compute", recipe="nbody")
    assert "speed.fold=true" not in texts("compute")


def test_idle_cores_are_threads_to_use() -> None:
    given = found("compute", cores=8, local_ranks=2, threads=1)
    assert Suggestion(("runtime.threads=4",), "6 of 8 cores are idle") in given
    assert "runtime.threads=4" not in [each.text for each in found("compute", device="cuda", threads=1)]


def test_a_cpu_that_has_bf16_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "cpu_has_bf16", lambda: True)
    assert "precision=bf16" in texts("compute")


@pytest.mark.parametrize(
    ("flags", "has"),
    [("flags: avx2 avx512_bf16 sse", True), ("flags: amx_bf16", True), ("Features: asimd bf16", True), ("avx2", False)],
)
def test_processors_say_whether_they_have_bf16(tmp_path: Path, flags: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(flags)
    assert cpu_has_bf16(tmp_path / "cpuinfo") is has


def test_a_host_without_a_list_of_processors_has_no_bf16(tmp_path: Path) -> None:
    assert cpu_has_bf16(tmp_path / "missing") is False


@pytest.mark.parametrize(
    ("mebibytes", "present", "expected"),
    [
        (400, None, ["ddp.bucket_mb=100", "ddp.bucket_mb=50", "ddp.bucket_mb=10"]),
        (400, 100, ["ddp.bucket_mb=50", "ddp.bucket_mb=10"]),
        (20, None, ["ddp.bucket_mb=100"]),
        (0.5, None, []),
        (5, 25, []),
    ],
)
def test_buckets_are_suggested_that_give_another_number_of_them(
    mebibytes: float, present: int | None, expected: list[str]
) -> None:
    settings = [f"ddp.bucket_mb={present}"] if present else []
    given = texts("communication", *settings, gradient_bytes=int(mebibytes * MEBIBYTE), ranks=2)
    assert [text for text in given if "bucket" in text] == expected


def test_what_slows_communication_is_turned_off() -> None:
    settings = ("ddp.broadcast_buffers=true", "ddp.direct=false", "ddp.find_unused_parameters=true")
    given = texts("communication", *settings, ranks=2, hosts=("a", "a"))
    assert given[:3] == ["ddp.broadcast_buffers=false", "ddp.direct=true", "ddp.find_unused_parameters=false"]
    assert "ddp.direct=true" not in texts("communication", *settings, ranks=2, hosts=("a", "b"))


def test_a_larger_batch_uses_the_key_of_the_recipe() -> None:
    (larger,) = found("communication", "batch.per_rank=8", "batch.micro=null", ranks=2)
    assert larger.overrides == ("batch.per_rank=16",)
    assert larger.changes == "batch"
    (larger,) = found("communication", ranks=2)
    assert larger.overrides == ("batch.global=128", "batch.micro=32")
    assert larger.why == "half as many steps; the learning rate is not scaled (schedule.scaling=none)"
    larger = found("communication", recipe="nbody", ranks=2)[-1]
    assert larger.why == "half as many steps; the learning rate is scaled (schedule.scaling=sqrt)"


def test_for_the_host_graphs_come_first_and_advice_where_code_must_change() -> None:
    counted = Work(0, 0, 0, 10, 3, ("model.py:12, 3 a step",))
    given = found("host", device="cuda", work=counted)
    assert given[0].overrides == ()
    assert "model.py:12, 3 a step" in given[0].why
    assert [each.text for each in given[1:]] == [
        "speed.compile=true speed.graphs=true",
        "speed.compile=true",
        "batch.micro=32",
        "batch.global=128 batch.micro=32",
    ]
    assert [each.changes for each in given[1:]] == [None, None, "batch", "batch"]


def test_for_memory_bandwidth() -> None:
    given = texts("memory", "batch.micro=null", device="cuda")
    assert given == [
        "precision=bf16",
        "speed.compile=true",
        "speed.compile=true speed.graphs=true",
        "batch.global=128",
    ]


def test_a_straggler_gets_advice_and_cores_of_its_own() -> None:
    given = found("straggler", ranks=2, local_ranks=2, hosts=("a", "a"))
    assert given[0].overrides == ()
    assert "on a" in given[0].why
    assert given[1].overrides == ("runtime.binding=compact",)
    assert len(found("straggler", "runtime.binding=spread", ranks=2, local_ranks=2)) == 1
    assert len(found("straggler", ranks=2, local_ranks=1)) == 1


def test_balanced_parts_are_suggested_for_in_turn() -> None:
    given = texts("balanced", batches_are_samples=True, cores=2, data=0.52, computing=0.48)
    assert given == ["data.workers=2", "speed.channels_last=true", "data.workers=4", "speed.compile=true"]


def test_a_line_has_the_change_and_warns_if_the_trained_model_changes() -> None:
    assert Suggestion(("data.workers=2",), "two read").line == "try data.workers=2: two read"
    assert Suggestion((), "examine rank 2").line == "examine rank 2"
    line = Suggestion(("precision=bf16",), "half the bytes", "precision").line
    assert line == "try precision=bf16: half the bytes (changes the precision, and so the trained model)"


def test_nothing_is_suggested_for_what_is_unclear() -> None:
    assert found("unclear") == []


def test_no_suggestion_comes_twice() -> None:
    given = texts("balanced", data=0.0, computing=0.5, rest=0.5, device="cuda")
    assert len(given) == len(set(given))


@pytest.mark.parametrize("recipe", ["digits", "mnist", "nbody/short", "imagenet/resnet18"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_suggestion_is_a_setting_that_changes_the_recipe(recipe: str, device: str) -> None:
    measurement: Measurement = made_up(
        recipe=recipe,
        ranks=2,
        device=device,
        data=0.4,
        computing=0.6,
        batches_are_samples="imagenet" in recipe,
        sources=("memory", "device") if "nbody" in recipe else (),
        gradient_bytes=400 * MEBIBYTE,
    )
    shares = find_shares(measurement)
    bounds = ("data loading", "compute", "communication", "host", "memory", "straggler", "balanced")
    overrides = {each.overrides for bound in bounds for each in suggest(measurement, bound, shares)} - {()}
    assert len(overrides) > 5
    original = resolve(recipe).config
    assert all(resolve(recipe, each).config != original for each in overrides)
