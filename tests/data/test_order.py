"""The global sample order: a function of seed and epoch, divided completely over any number of ranks."""

import numpy as np
import pytest

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.data.order import SampleOrder, evaluation_ids, permutation


def plan(ranks: int, global_batch: int = 12, samples: int = 50, epochs: int = 3) -> Plan:
    per_rank = global_batch // ranks
    return Plan(Layout(ranks), global_batch, per_rank, per_rank, samples, epochs)


def test_an_epoch_is_a_permutation_of_all_samples() -> None:
    for samples in (1, 2, 7, 1000):
        assert sorted(permutation(samples, 42, 3)) == list(range(samples))


def test_the_permutation_depends_on_seed_and_epoch_alone() -> None:
    np.random.seed(1)
    first = permutation(100, 42, 3)
    np.random.seed(2)
    permutation(100, 7, 7)
    assert np.array_equal(permutation(100, 42, 3), first)
    others = [permutation(100, seed, epoch) for seed, epoch in ((42, 4), (43, 3), (3, 42), (0, 0))]
    assert all((first == other).mean() < 0.1 for other in others)


def test_the_permutation_never_changes() -> None:
    assert permutation(10, 42, 0).tolist() == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]
    assert permutation(10, 42, 1).tolist() == [0, 8, 7, 4, 3, 1, 2, 9, 6, 5]


def test_large_seeds_have_orders_of_their_own() -> None:
    large = [s + (k << 32) for s in (0, 5) for k in (1, 7, 2**31 - 1)]
    pairs = [(seed, epoch) for seed in (0, 5, 7, *large) for epoch in range(8)]
    orders = {permutation(50, seed, epoch).tobytes() for seed, epoch in pairs}
    assert len(orders) == len(pairs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ranks_together_take_the_global_batch_in_order(ranks: int) -> None:
    alone, shared = SampleOrder(plan(1), 42), SampleOrder(plan(ranks), 42)
    for step in range(12):
        parts = [shared.rank_ids(step, rank) for rank in range(ranks)]
        assert {len(part) for part in parts} == {12 // ranks}
        assert np.array_equal(np.concatenate(parts), alone.global_ids(step))


def test_a_sample_comes_at_most_once_an_epoch_and_the_rest_is_another_one_each_time() -> None:
    order = SampleOrder(plan(2), 42)
    left_out = []
    for epoch in range(3):
        steps = range(4 * epoch, 4 * epoch + 4)
        assert {order.epoch_of(step) for step in steps} == {epoch}
        seen = np.concatenate([order.global_ids(step) for step in steps])
        assert len(seen) == len(set(seen)) == 48
        assert np.array_equal(seen, permutation(50, 42, epoch)[:48])
        left_out.append(frozenset(range(50)) - frozenset(seen))
    assert len(set(left_out)) == 3


def test_steps_may_be_asked_for_in_any_order() -> None:
    steps = [11, 0, 5, 4, 3, 11, 0]
    straight = {step: SampleOrder(plan(1), 42).global_ids(step) for step in range(12)}
    order = SampleOrder(plan(1), 42)
    for step in steps:
        assert np.array_equal(order.global_ids(step), straight[step])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("samples", [0, 1, 5, 10, 360])
def test_an_evaluation_covers_each_sample_once_in_even_parts(samples: int, ranks: int) -> None:
    parts = [evaluation_ids(samples, rank, ranks) for rank in range(ranks)]
    assert np.concatenate(parts).tolist() == list(range(samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
