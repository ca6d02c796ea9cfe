"""Random numbers of samples: the same in any batch, uniform, and independent of each other."""

import pytest
import torch

from tutti.data.order import Draws

MANY = torch.arange(100_000)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((first, second)))[0, 1])


def test_a_sample_draws_the_same_in_any_batch_and_order() -> None:
    ids = torch.arange(1000)
    whole = Draws(42, 3, ids)
    numbers = [whole.uniform(), whole.integers(0, 9), whole.uniform()]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(1000, generator=generator)[:37]
    part = Draws(42, 3, chosen)
    assert all(
        torch.equal(found, expected[chosen])
        for found, expected in zip([part.uniform(), part.integers(0, 9), part.uniform()], numbers, strict=True)
    )
    for sample in (0, 17, 999):
        assert Draws(42, 3, torch.tensor([sample])).uniform() == numbers[0][sample]


def test_draws_do_not_touch_or_follow_torchs_own_generator() -> None:
    torch.manual_seed(1)
    first = Draws(42, 3, MANY[:10]).uniform()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(Draws(42, 3, MANY[:10]).uniform(), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_draws_never_change() -> None:
    draws = Draws(42, 3, torch.tensor([0, 1, 59_999, 2**40]))
    assert draws.uniform().tolist() == [
        0.15359644739082268,
        0.9951317074129578,
        0.8484225526469654,
        0.032493333111337175,
    ]
    assert draws.integers(0, 4).tolist() == [0, 4, 0, 4]
    assert draws.uniform().tolist() == [0.36315988283701117, 0.3346739260490528, 0.3177147982972782, 0.1616294332929249]
    assert Draws(0, 0, torch.tensor([0])).uniform().tolist() == [0.644691384291366]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 0), (42, 7), (2**62, 10_000)])
def test_uniform_numbers_fill_the_unit_interval_evenly(seed: int, epoch: int) -> None:
    draws = Draws(seed, epoch, MANY)
    for _ in range(3):
        found = draws.uniform()
        assert found.dtype == torch.float64
        assert 0 <= found.min() < 1e-4 and 1 - 1e-4 < found.max() < 1
        assert abs(found.mean() - 1 / 2) < 0.004
        assert abs(found.var() - 1 / 12) < 0.001
        counts = torch.histc(found.float(), 50, 0, 1)
        assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-square with 49 degrees of freedom


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 3), (0, 6), (5, 5), (0, 99)])
def test_whole_numbers_include_both_ends_evenly(low: int, high: int) -> None:
    draws = Draws(42, 3, MANY)
    for _ in range(3):
        values, counts = draws.integers(low, high).unique(return_counts=True)
        assert values.tolist() == list(range(low, high + 1))
        expected = len(MANY) / len(values)
        assert ((counts - expected) ** 2 / expected).sum() < 2 * len(values) + 15


def test_draws_are_unrelated_between_calls_epochs_seeds_and_neighbours() -> None:
    draws = Draws(42, 3, MANY)
    first, second, third = draws.uniform(), draws.uniform(), draws.uniform()
    others = {
        "next draw": second,
        "third draw": third,
        "next epoch": Draws(42, 4, MANY).uniform(),
        "next seed": Draws(43, 3, MANY).uniform(),
        "swapped": Draws(3, 42, MANY).uniform(),
        "neighbour": first.roll(1),
        "neighbour's next": second.roll(1),
    }
    far = {name: value for name, other in others.items() if abs(value := correlation(first, other)) > 0.012}
    assert not far
    pairs = (8 * first).long() * 8 + (8 * second).long()
    counts = torch.bincount(pairs, minlength=64).double()
    expected = len(MANY) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square with 63 degrees of freedom
