"""Orders that are functions of the position: keyed permutations and shuffled blocks, for any number of samples."""

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.config.layout import Layout
from tutti.config.load import load
from tutti.config.plan import Plan
from tutti.data import order as order_module
from tutti.data.order import (
    STORED_BELOW,
    BlockPermutation,
    SampleOrder,
    keyed_permutation,
    make_order,
    permutation,
)
from tutti.errors import ConfigError, DataError
from tutti.ranks.device import mix

KEYS = st.integers(0, 2**63 - 1)
repeatable = settings(max_examples=40, deadline=None, derandomize=True)
LARGE = 70_001  # samples: enough for rounds on a grid, whose last row is not full


def plan(ranks: int, samples: int, global_batch: int = 64, epochs: int = 3) -> Plan:
    per_rank = global_batch // ranks
    return Plan(Layout(ranks), global_batch, per_rank, per_rank, samples, epochs)


def make(made: Plan, *overrides: str, dataset: Any = None, made_with: str | None = None) -> SampleOrder:
    return make_order(load("digits", *(f"data.{text}" for text in overrides)), made, dataset, made_with)


def keyed(samples: int, epoch: int, seed: int = 11) -> np.ndarray:
    """All sample ids in the keyed order of an epoch."""
    return keyed_permutation(samples, mix(seed, epoch))(0, samples)


def excess(counts: np.ndarray, freedom: int) -> float:
    """The chi-square of counts that should be equal, in standard deviations from its mean."""
    expected = counts.mean()
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.fixture
def rounds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples are permuted by rounds on a grid as well."""
    monkeypatch.setattr(order_module, "_DRAWN_BELOW", 0)


# The keyed permutation.


@repeatable
@given(st.one_of(st.integers(1, 300), st.integers(60_000, 140_000)), KEYS)
def test_every_sample_has_one_position(samples: int, key: int) -> None:
    found = keyed_permutation(samples, key)(0, samples)
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(samples))


@pytest.mark.usefixtures("rounds_for_all")
def test_rounds_on_any_grid_are_a_permutation() -> None:
    for samples in (*range(1, 130), 1023, 1024, 1025, 65_535, 65_536, 65_537):
        assert np.array_equal(np.sort(keyed(samples, 0)), np.arange(samples)), samples


@repeatable
@given(st.integers(2**16, 2**62), KEYS, st.data())
def test_samples_of_any_number_are_distinct_and_in_range(samples: int, key: int, data: st.DataObject) -> None:
    take = keyed_permutation(samples, key)
    starts = data.draw(st.sets(st.integers(0, (samples - 1) // 512), min_size=1, max_size=4))
    counts = [min(512, samples - start * 512) for start in starts]
    found = np.concatenate([take(start * 512, count) for start, count in zip(starts, counts, strict=True)])
    assert len(np.unique(found)) == sum(counts)
    assert found.min() >= 0 and found.max() < samples


@repeatable
@given(st.integers(1, 100_000), KEYS, st.data())
def test_a_position_has_its_sample_whatever_else_is_asked(samples: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, samples - 1))
    count = data.draw(st.integers(1, samples - first))
    take = keyed_permutation(samples, key)
    assert np.array_equal(take(first, count), take(0, samples)[first : first + count])


def test_the_keyed_order_never_changes() -> None:
    fixed = {
        12: [11, 3, 5, 2],
        LARGE: [57278, 60418, 36436, 42639],
        10**10: [3052919942, 2345775017, 4302212708, 4449297752],
        2**62: [2900928067776749635, 1677463349748138930, 647638043756477502, 4303847783193524317],
    }
    for samples, ids in fixed.items():
        assert keyed_permutation(samples, 42)(samples // 3, 4).tolist() == ids


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_all_orders_of_few_samples_are_equally_frequent(samples: int) -> None:
    epochs = 2400
    found = Counter(tuple(keyed(samples, epoch).tolist()) for epoch in range(epochs))
    orders = list(itertools.permutations(range(samples)))
    assert abs(excess(np.array([found[each] for each in orders], float), len(orders) - 1)) < 4


def test_every_sample_is_equally_frequent_at_every_position_of_few() -> None:
    samples = 10
    orders = np.array([keyed(samples, epoch) for epoch in range(3000)])
    counts = np.array([np.bincount(orders[:, position], minlength=samples) for position in range(samples)])
    assert abs(excess(counts, (samples - 1) ** 2)) < 4


@pytest.mark.parametrize("samples", [LARGE, 2**16])
def test_many_samples_are_spread_evenly_and_neighbours_apart(samples: int) -> None:
    """16 x 16 parts of positions and samples, steps between neighbours, and how many neighbours stay so."""
    parts, epochs = 16, 12
    places = np.arange(samples) * parts // samples
    spread, steps, neighbours = np.zeros((parts, parts)), np.zeros(64), 0
    for epoch in range(epochs):
        found = keyed(samples, epoch)
        np.add.at(spread, (places, found * parts // samples), 1)
        apart = np.diff(found) % samples
        steps += np.bincount(apart * 64 // samples, minlength=64)
        neighbours += int((apart == 1).sum())
    assert abs(excess(spread, (parts - 1) ** 2)) < 4
    assert abs(excess(steps, 63)) < 4
    assert 1 <= neighbours <= 2 * epochs, "one an epoch by chance; 4 rounds leave two"


def test_epochs_are_independent() -> None:
    orders = [keyed(LARGE, epoch) for epoch in range(12)]
    pairs = list(itertools.pairwise(orders))
    related = [abs(np.corrcoef(one, other)[0, 1]) * LARGE**0.5 for one, other in pairs]
    assert max(related) < 4, "in standard deviations of independent orders"
    same = [int((one == other).sum()) for one, other in pairs]
    assert 0 < sum(same) < 3 * len(pairs), "one in each pair by chance"
    after = [one[np.argsort(other)] for one, other in pairs]  # the order of an epoch, seen from the next one
    assert sum(int((np.diff(each) == 1).sum()) for each in after) < 3 * len(pairs)


def test_no_memory_is_taken_for_samples_of_other_steps() -> None:
    made = plan(2, 10**10, global_batch=256)
    order = make(made)
    assert order.name == "keyed"
    order.rank_ids(5, 1)  # what is imported or compiled at the first call
    tracemalloc.start()
    try:
        for step in (0, 1, made.steps_per_epoch - 1, made.steps_per_epoch):
            assert len(order.rank_ids(step, 1)) == 128
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


# Blocks.


@st.composite
def boundaries(draw: st.DrawFn) -> np.ndarray:
    """The first sample of each of up to 40 blocks of unequal sizes, and the number of samples."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=40))
    return np.concatenate(([0], np.cumsum(sizes)))


@repeatable
@given(boundaries(), st.integers(1, 9), KEYS)
def test_blocks_hold_every_sample_once_and_a_window_only_its_blocks(edges: np.ndarray, window: int, key: int) -> None:
    samples = int(edges[-1])
    take = BlockPermutation(edges, window, key)
    found = take(0, samples)
    assert np.array_equal(np.sort(found), np.arange(samples))
    blocks = np.searchsorted(edges, found, side="right") - 1
    end, met = 0, []
    for number in range(take.windows):
        inside = take.ranges(number)
        begin, end = end, end + sum(last - first for first, last in inside)
        assert {(int(edges[block]), int(edges[block + 1])) for block in blocks[begin:end]} == set(inside)
        assert len(inside) == window or number == take.windows - 1
        assert {take.window_of(position) for position in range(begin, end)} == {number}
        met += inside
    assert end == samples and len(met) == len(edges) - 1


@repeatable
@given(boundaries(), st.integers(1, 9), KEYS, st.data())
def test_positions_of_blocks_may_be_asked_for_in_any_order(
    edges: np.ndarray, window: int, key: int, data: st.DataObject
) -> None:
    samples = int(edges[-1])
    whole, used = BlockPermutation(edges, window, key)(0, samples), BlockPermutation(edges, window, key)
    for first in data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=6)):
        count = data.draw(st.integers(1, samples - first))
        assert np.array_equal(used(first, count), whole[first : first + count])


def test_large_windows_are_permuted_without_being_stored() -> None:
    edges = np.append(np.arange(0, 10**9, 10**5), 10**9)
    take = BlockPermutation(edges, 100, 7)
    tracemalloc.start()
    try:
        found = take(123_456_789, 256)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16
    assert len(np.unique(found)) == 256 and len(np.unique(found // 10**5)) <= 100


def test_samples_and_blocks_are_mixed_evenly() -> None:
    """Over epochs each block comes equally often at each place, and each sample of a window in each part of it."""
    blocks, size, window, epochs = 8, 50, 4, 600
    edges = np.arange(0, blocks * size + 1, size)
    first, places = np.zeros(blocks), np.zeros((window, size))
    for epoch in range(epochs):
        found = BlockPermutation(edges, window, mix(3, epoch))(0, window * size)
        first[np.unique(found // size)] += 1
        np.add.at(places, (np.arange(window * size) // size, found % size), 1)
    assert abs(excess(first, blocks - 1)) < 4
    assert abs(excess(places, (window - 1) * (size - 1))) < 4


# The order of a run.

ORDERS: dict[str, Callable[[Plan], SampleOrder]] = {
    "stored": lambda made: make(made, "shuffle=stored"),
    "keyed": lambda made: make(made, "shuffle=keyed"),
    "blocks": lambda made: make(made, "shuffle=blocks", "shuffle_block=1000", "shuffle_window=3"),
}


@pytest.mark.parametrize("samples", [1000, LARGE])
@pytest.mark.parametrize("name", ORDERS)
def test_the_samples_of_a_step_are_the_same_on_any_number_of_ranks_and_after_a_resume(name: str, samples: int) -> None:
    alone = ORDERS[name](plan(1, samples))
    epoch = plan(1, samples).steps_per_epoch
    straight = {step: alone.global_ids(step) for step in (0, 1, 7, epoch - 1, epoch, epoch + 1)}
    assert not np.array_equal(straight[0], straight[epoch])
    for ranks in (1, 2, 4):
        for step, ids in straight.items():
            resumed = ORDERS[name](plan(ranks, samples))  # nothing but the step is known
            parts = [resumed.rank_ids(step, rank) for rank in range(ranks)]
            assert {len(part) for part in parts} == {64 // ranks}
            assert np.array_equal(np.concatenate(parts), ids)


@pytest.mark.parametrize("name", ORDERS)
def test_an_epoch_takes_each_sample_at_most_once_and_leaves_out_others_in_the_next(name: str) -> None:
    made = plan(2, 1000)
    order, left_out = ORDERS[name](made), []
    for epoch in range(3):
        steps = range(epoch * made.steps_per_epoch, (epoch + 1) * made.steps_per_epoch)
        seen = np.concatenate([order.global_ids(step) for step in steps])
        assert len(np.unique(seen)) == len(seen) == 960
        left_out.append(frozenset(range(1000)) - frozenset(seen.tolist()))
    assert len(set(left_out)) == 3


def test_steps_take_their_samples_from_few_blocks() -> None:
    made = plan(2, 10_000, global_batch=50)
    order = make(made, "shuffle=blocks", "shuffle_block=100", "shuffle_window=4")
    for first in range(0, made.steps_per_epoch, 8):  # a window is 8 steps
        ids = np.concatenate([order.global_ids(step) for step in range(first, first + 8)])
        assert len(np.unique(ids // 100)) == 4


def test_the_order_follows_the_number_of_samples_unless_it_is_named() -> None:
    assert make(plan(1, STORED_BELOW - 1)).name == "stored"
    assert make(plan(1, STORED_BELOW)).name == "keyed"
    assert make(plan(1, 1000), "shuffle=keyed").name == "keyed"
    assert make(plan(1, STORED_BELOW), "shuffle=stored").name == "stored"
    assert SampleOrder(plan(1, STORED_BELOW), 42).name == "keyed"


def test_a_run_that_leaves_the_order_open_continues_as_its_checkpoint() -> None:
    """Manifests of the first versions name no order, which reads as stored."""
    assert make(plan(1, STORED_BELOW), made_with="stored").name == "stored"
    assert make(plan(1, 1000), made_with="keyed").name == "keyed"
    assert make(plan(1, 1000), "shuffle=stored", made_with="keyed").name == "stored"
    old = make(plan(1, 1000), made_with="stored")
    assert np.array_equal(old.global_ids(0), permutation(1000, 42, 0)[:64])


class Shards:
    """A dataset in shards."""

    def __init__(self, *blocks: Any) -> None:
        self.blocks = list(blocks)


def test_a_dataset_provides_its_own_blocks() -> None:
    made = plan(1, 1000, global_batch=10)
    order = make(made, "shuffle=blocks", "shuffle_window=1", dataset=Shards(0, 300, 310))
    first = order.global_ids(0).tolist()
    assert any(set(first) <= set(range(*block)) for block in ((0, 300), (300, 310), (310, 1000)))
    others = [Shards(0, 300, 311), Shards(0, 300)]
    names = {make(made, "shuffle=blocks", dataset=each).name for each in others} | {order.name}
    assert len(names) == 3, "a checkpoint does not continue with other shards"
    assert make(made, "shuffle=blocks", "shuffle_block=7", dataset=Shards(0)).name == "blocks of 7 in windows of 8"


@pytest.mark.parametrize(
    "blocks", [(), (1, 5), (0, 5, 5), (0, 1000), (0, 9, 3), ((0, 5),), ("first",), (None,), (2**70,)]
)
def test_blocks_that_are_not_ascending_are_refused(blocks: tuple[Any, ...]) -> None:
    with pytest.raises(DataError, match=r"the dataset Shards has blocks=\[.*\] with 1,000 samples: expected the first"):
        make(plan(1, 1000), "shuffle=blocks", dataset=Shards(*blocks))


def test_blocks_of_unknown_size_and_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'digits' has no shards.* Set data.shuffle_block, for example"):
        make(plan(1, 1000), "shuffle=blocks")
    with pytest.raises(ConfigError, match=r"data.shuffle_block=5 cuts 10,000,000,000 .* Set data.shuffle_block=597\."):
        make(plan(1, 10**10), "shuffle=blocks", "shuffle_block=5")


# What is read ahead.


@pytest.mark.parametrize("batch", [7, 40, 250])
@pytest.mark.parametrize("first_step", [0, 5])
def test_each_block_is_told_once_an_epoch_before_its_samples_are_used(batch: int, first_step: int) -> None:
    made = plan(1, 1000, global_batch=batch)
    order = make(made, "shuffle=blocks", "shuffle_block=30", "shuffle_window=3")
    told: list[list[tuple[int, int]]] = [[] for _ in range(made.epochs + 1)]
    per_epoch, known = -(-1000 // 30), set()
    for step, blocks in zip(range(first_step, made.total_steps), order.ahead(first_step), strict=True):
        known |= set(blocks)
        for block in blocks:
            next(each for each in told if len(each) < per_epoch).append(block)
        needed = {int(i) // 30 * 30 for i in order.global_ids(step)}
        assert needed <= {first for first, _ in known}
    if first_step == 0:
        assert all(len(set(each)) == per_epoch for each in told[: made.epochs])
        assert told[made.epochs] == []


def test_an_order_without_blocks_reads_nothing_ahead() -> None:
    assert list(make(plan(1, 1000), "shuffle=keyed").ahead(40)) == [[]] * 5
