"""Properties of the sample order and of the draws of samples, for any plan, seed and epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.data.order import Draws, SampleOrder, evaluation_ids, permutation, same_number_size
from tutti.errors import TrainingError

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 100_000)
SAMPLES = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)
CALLS = st.lists(st.sampled_from(["uniform", "integers", "alternating"]), min_size=1, max_size=6)

repeatable = settings(max_examples=60, deadline=None, derandomize=True)


def plan(ranks: int, global_batch: int, samples: int, micro: int | None = None, epochs: int = 3) -> Plan:
    per_rank = global_batch // ranks
    return Plan(Layout(ranks), global_batch, per_rank, micro or per_rank, samples, epochs)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of up to 8 ranks, with a dataset that need not be a multiple of its batch."""
    ranks, micro, passes = draw(st.integers(1, 8)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    global_batch = ranks * micro * passes
    samples = draw(st.integers(global_batch, 6 * global_batch))
    return plan(ranks, global_batch, samples, micro, draw(st.integers(1, 3)))


def tensor(ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def taken(draws: Draws, call: str, low: int = -3, high: int = 8) -> torch.Tensor:
    return draws.integers(low, high) if call == "integers" else getattr(draws, call)()


@repeatable
@given(plans(), SEEDS, EPOCHS)
def test_every_epoch_sees_each_sample_at_most_once(made: Plan, seed: int, epoch: int) -> None:
    order = SampleOrder(made, seed)
    steps = range(epoch * made.steps_per_epoch, (epoch + 1) * made.steps_per_epoch)
    assert {order.epoch_of(step) for step in steps} == {epoch}
    seen = np.concatenate([order.global_ids(step) for step in steps])
    assert len(seen) == len(np.unique(seen)) == made.steps_per_epoch * made.global_batch
    assert seen.min() >= 0 and seen.max() < made.train_samples
    assert np.array_equal(seen, permutation(made.train_samples, seed, epoch)[: len(seen)])
    assert made.train_samples - len(seen) < made.global_batch


@repeatable
@given(st.integers(1, 500), SEEDS, EPOCHS)
def test_the_order_of_an_epoch_holds_all_samples(samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permutation(samples, seed, epoch)), np.arange(samples))


@repeatable
@given(st.integers(1, 120), st.integers(1, 4), st.integers(0, 50), SEEDS)
def test_the_samples_of_a_step_are_the_same_on_any_number_of_ranks(
    batch: int, batches: int, rest: int, seed: int
) -> None:
    samples = batch * batches + min(rest, batch - 1)
    alone = SampleOrder(plan(1, batch, samples), seed)
    for ranks in (ranks for ranks in range(2, 9) if batch % ranks == 0):
        shared = SampleOrder(plan(ranks, batch, samples, micro=1), seed)
        for step in range(2 * batches):
            parts = [shared.rank_ids(step, rank) for rank in range(ranks)]
            assert {len(part) for part in parts} == {batch // ranks}
            assert np.array_equal(np.concatenate(parts), alone.rank_ids(step, 0))


@repeatable
@given(plans(), SEEDS, st.lists(st.integers(0, 30), min_size=1, max_size=10))
def test_the_samples_of_a_step_do_not_depend_on_the_steps_before_it(made: Plan, seed: int, steps: list[int]) -> None:
    used = SampleOrder(made, seed)
    for step in steps:
        assert np.array_equal(used.global_ids(step), SampleOrder(made, seed).global_ids(step))


@repeatable
@given(st.integers(25, 200), SEEDS, st.integers(0, 62), EPOCHS, st.integers(1, 100_000))
def test_another_epoch_or_another_seed_has_another_order(
    samples: int, seed: int, bit: int, epoch: int, more: int
) -> None:
    """25 samples have 1.5e25 orders: two of them are never the same by chance."""
    orders = [(seed, epoch), (seed ^ (1 << bit), epoch), (seed, epoch + more), (seed + more, epoch)]
    found = {permutation(samples, *order).tobytes() for order in orders}
    assert len(found) == len(set(orders))


@repeatable
@given(st.integers(0, 10_000), st.integers(1, 300))
def test_an_evaluation_takes_each_sample_on_one_rank_in_even_parts(samples: int, ranks: int) -> None:
    parts = [evaluation_ids(samples, rank, ranks) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(parts), np.arange(samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@repeatable
@given(st.integers(1, 300), st.integers(1, 100), st.data())
def test_all_ranks_evaluate_as_many_batches(ranks: int, size: int, data: st.DataObject) -> None:
    samples = data.draw(st.integers(ranks, 10_000))
    found = same_number_size(samples, ranks, size)
    counts = [len(evaluation_ids(samples, rank, ranks)) for rank in range(ranks)]
    assert len({-(-count // found) for count in counts}) == 1
    if len({-(-count // size) for count in counts}) == 1:
        assert found == min(size, max(counts))  # not larger than it has to be


def test_ranks_without_a_sample_are_refused_where_all_enter() -> None:
    with pytest.raises(TrainingError, match=r"^validation on 3 samples with 4 ranks that share the weights: expected"):
        same_number_size(3, 4, 1)


@repeatable
@given(SEEDS, EPOCHS, SAMPLES, CALLS, st.data())
def test_a_draw_depends_on_seed_epoch_sample_and_its_number_alone(
    seed: int, epoch: int, ids: list[int], calls: list[str], data: st.DataObject
) -> None:
    whole = Draws(seed, epoch, tensor(ids))
    found = [taken(whole, call) for call in calls]
    chosen = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=5))
    part = Draws(seed, epoch, tensor([ids[place] for place in chosen]))
    assert all(
        torch.equal(taken(part, call), all_of_them[chosen]) for call, all_of_them in zip(calls, found, strict=True)
    )


@repeatable
@given(SEEDS, EPOCHS, SAMPLES, st.integers(-(2**40), 2**40), st.integers(0, 2**31 - 1))
def test_draws_are_within_their_range(seed: int, epoch: int, ids: list[int], low: int, width: int) -> None:
    draws = Draws(seed, epoch, tensor(ids))
    uniform, integers, yes = draws.uniform(), draws.integers(low, low + width), draws.alternating()
    assert uniform.shape == integers.shape == yes.shape == (len(ids),)
    assert uniform.dtype == torch.float64 and bool(((uniform >= 0) & (uniform < 1)).all())
    assert integers.dtype == torch.int64 and bool(((integers >= low) & (integers <= low + width)).all())
    assert yes.dtype == torch.bool


@repeatable
@given(
    seed=SEEDS,
    bit=st.integers(0, 62),
    epoch=EPOCHS,
    more=st.integers(1, 100_000),
    ids=st.sets(st.integers(0, 2**63 - 1), min_size=2, max_size=20),
)
def test_another_seed_epoch_sample_or_call_draws_another_number(
    seed: int, bit: int, epoch: int, more: int, ids: set[int]
) -> None:
    samples = tensor(sorted(ids))
    draws = Draws(seed, epoch, samples)
    first = draws.uniform()
    assert len(first.unique()) == len(ids)
    others = [draws, Draws(seed ^ (1 << bit), epoch, samples), Draws(seed, epoch + more, samples)]
    found = [first, *(other.uniform() for other in others), Draws(seed + more, epoch, samples).uniform()]
    distinct = len({(seed, epoch, 2), (seed ^ (1 << bit), epoch, 1), (seed, epoch + more, 1), (seed + more, epoch, 1)})
    assert len(torch.cat(found).unique()) == (1 + distinct) * len(ids)


@repeatable
@given(SEEDS, EPOCHS, SAMPLES, st.integers(0, 3))
def test_an_alternating_answer_is_the_other_one_in_every_other_epoch(
    seed: int, epoch: int, ids: list[int], draws_before: int
) -> None:
    now, after, later = (Draws(seed, epoch + more, tensor(ids)) for more in range(3))
    for _ in range(draws_before):
        now.uniform()
    first = now.alternating()
    assert torch.equal(first, ~after.alternating())
    assert torch.equal(first, later.alternating())
