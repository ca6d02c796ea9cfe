"""The next change to try, and whether it is kept, from made-up measurements."""

import json
from typing import Any

import pytest
from made_up import by_rank, made_up

from tutti.bench import suggestions
from tutti.bench.greedy_search import GreedySearch, compare
from tutti.bench.results import Measurement
from tutti.bench.shares import Figure
from tutti.bench.suggestions import Suggestion


@pytest.fixture(autouse=True)
def _plain_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "cpu_has_bf16", lambda: False)


def step(*settings: str, data: float = 0.0, computing: float = 0.0, **values: Any) -> Measurement:
    return made_up(*settings, data=data, computing=computing, **{"cores": 2, "batches_are_samples": True} | values)


def try_changes(search: GreedySearch, *speeds: Measurement | str) -> list[str]:
    """Note what is found for each suggestion, and say what was tried."""
    tried = []
    for found in speeds:
        chosen = search.next()
        assert chosen is not None
        search.note(chosen, found)
        tried.append(chosen.text)
    return tried


@pytest.mark.parametrize(
    ("before", "after", "kept", "outcome"),
    [
        ((100.0,) * 5, (110.0,) * 5, True, "kept"),
        ((100.0,) * 5, (101.0,) * 5, False, "within the noise of 2%"),
        ((100.0,) * 5, (90.0,) * 5, False, "slower"),
        ((80.0, 90.0, 100.0, 110.0, 120.0), (110.0,) * 5, False, "within the noise of 20%"),
        ((80.0, 90.0, 100.0, 110.0, 120.0), (125.0,) * 5, True, "kept"),
        ((100.0,) * 5, (90.0, 100.0, 110.0, 120.0, 130.0), False, "within the noise of 20%"),
        ((0.0,) * 5, (0.0,) * 5, False, "not measured"),
    ],
)
def test_only_changes_faster_beyond_the_noise_are_kept(
    before: tuple[float, ...], after: tuple[float, ...], kept: bool, outcome: str
) -> None:
    assert compare(Figure(before), Figure(after)) == (kept, outcome)


def test_changes_for_the_bound_come_first_and_the_verdict_is_updated() -> None:
    search = GreedySearch(step(data=0.9, computing=0.1))
    read = step("data.workers=4", data=0.0, computing=0.1)
    compiled = step("data.workers=4", "speed.channels_last=true", computing=0.05)
    assert try_changes(search, read, compiled) == ["data.workers=4", "speed.channels_last=true"]
    assert search.kept == {"data.workers": "4", "speed.channels_last": "true"}
    assert search.gain == pytest.approx(20.0)
    assert [change.verdict.split(":")[0] for change in search.tried] == [
        "bound by data loading",
        "bound by compute",
        "bound by compute",
    ]


def test_each_change_is_tried_in_addition_to_those_kept() -> None:
    search = GreedySearch(step(data=0.9, computing=0.1))
    try_changes(search, step("data.workers=4", computing=0.1))
    chosen = search.next()
    assert chosen is not None
    assert search.overrides_with(chosen) == ("data.workers=4", "speed.channels_last=true")


def test_a_later_value_takes_the_place_of_an_earlier_one() -> None:
    search = GreedySearch(step(data=0.9, computing=0.1, cores=8))
    try_changes(search, step("data.workers=16", data=0.5, computing=0.1, cores=8))
    again = Suggestion(("data.workers=8",), "fewer")
    assert search.overrides_with(again) == ("data.workers=8",)


def test_when_all_changes_for_the_bound_were_tried_the_next_part_follows() -> None:
    slow = step(data=0.7, computing=0.3)
    search = GreedySearch(slow)
    tried = try_changes(search, slow, slow, slow, slow)
    assert tried == ["data.workers=4", "data.workers=2", "speed.channels_last=true", "speed.compile=true"]
    assert search.next() is None
    assert search.kept == {}
    assert search.gain == 1.0
    assert {change.outcome for change in search.tried[1:]} == {"within the noise of 2%"}


def test_nothing_is_tried_against_a_part_that_is_small() -> None:
    slow = step(data=0.97, computing=0.03)
    search = GreedySearch(slow)
    assert try_changes(search, slow, slow) == ["data.workers=4", "data.workers=2"]
    assert search.next() is None


def test_a_change_that_did_not_help_is_tried_again_after_another_was_kept() -> None:
    first = step(computing=1.0, batches_are_samples=False)
    faster = step("speed.compile=true", computing=0.5, batches_are_samples=False)
    search = GreedySearch(first)
    tried = try_changes(search, first, faster)
    assert tried == ["speed.channels_last=true", "speed.compile=true"]
    assert try_changes(search, faster) == ["speed.channels_last=true"]
    assert search.next() is None


def test_a_change_that_failed_is_recorded_and_not_tried_again() -> None:
    first = step(computing=1.0, batches_are_samples=False)
    faster = step("speed.compile=true", computing=0.5, batches_are_samples=False)
    search = GreedySearch(first)
    try_changes(search, "rank 1: out of memory\nmore", faster)
    failed = search.tried[1]
    assert (failed.outcome, failed.after, failed.kept) == ("failed: rank 1: out of memory", None, False)
    assert failed.gain is None
    assert search.next() is None


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        ((), ["speed.compile=true"]),
        (("precision",), ["precision=bf16", "speed.compile=true"]),
        (("precision", "batch"), ["precision=bf16", "speed.compile=true", "batch.global=128 batch.micro=32"]),
    ],
)
def test_changes_of_the_trained_model_are_tried_only_if_allowed(
    allow: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suggestions, "cpu_has_bf16", lambda: True)
    slow = step("speed.channels_last=true", ranks=2, computing=0.5, communication=0.5, batches_are_samples=False)
    search = GreedySearch(slow, allow)
    tried = []
    while chosen := search.next():
        tried.append(chosen.text)
        search.note(chosen, slow)
    assert sorted(tried) == sorted(expected)


def test_a_larger_batch_is_compared_by_samples_and_not_by_steps() -> None:
    slow = step("speed.channels_last=true", "speed.compile=true", ranks=2, computing=0.2, communication=0.8)
    search = GreedySearch(slow, ("batch",))
    chosen = search.next()
    assert chosen is not None and chosen.changes == "batch"
    larger = step(ranks=2, computing=0.4, communication=0.8, global_batch=128)
    assert search.note(chosen, larger).kept
    assert search.gain == pytest.approx(2 / 1.2)


def test_changes_that_were_not_tried_are_listed_with_how_to_try_them() -> None:
    slow = step(ranks=2, computing=by_rank(0.2, 1.0), local_ranks=2, hosts=("a", "a"))  # pyright: ignore[reportArgumentType]
    left = GreedySearch(slow).left()
    assert left[0] == "examine rank 1 on a, for example with tutti doctor"
    assert left[1].startswith("runtime.binding=compact: every rank has cores of its own; ranks do that when they start")
    slow = step(ranks=2, computing=0.2, communication=0.8)
    assert GreedySearch(slow).left() == [
        "batch.global=128 batch.micro=32: half as many steps; the learning rate is not scaled (schedule.scaling=none); "
        "may be tried with --allow batch"
    ]


def test_binding_is_not_tried_in_ranks_that_have_started() -> None:
    slow = step(ranks=2, computing=by_rank(0.01, 1.0), local_ranks=2, hosts=("a", "a"))  # pyright: ignore[reportArgumentType]
    assert GreedySearch(slow).next() is None


def test_changes_are_written_as_json() -> None:
    search = GreedySearch(step(data=0.9, computing=0.1))
    try_changes(search, "no", step(computing=0.1))
    found = json.loads(json.dumps([change.content() for change in search.tried]))
    assert [change["gain"] for change in found] == [None, None, pytest.approx(10.0)]
    assert [change["kept"] for change in found] == [True, False, True]
    assert found[2]["overrides"] == ["data.workers=2"]
    assert found[2]["samples_per_second"] == pytest.approx(320.0)
    assert found[2]["before"] == [pytest.approx(32.0)] * 5
