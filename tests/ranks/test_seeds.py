"""Seeds are functions of what they belong to: stable, spread, and enough to repeat a pass."""

import itertools

import pytest
import torch

from tutti.ranks.device import mix, seed_pass

CPU = torch.device("cpu")


def dropped(seed: int, step: int, micro_batch: int) -> torch.Tensor:
    seed_pass(CPU, seed, step, micro_batch)
    return torch.nn.functional.dropout(torch.ones(256), 0.5)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ((0,), 0xE220A8397B1DCDAF >> 1),  # the first output of splitmix64 from state 0, as published
        ((1234567,), 6457827717110365317 >> 1),  # and from state 1234567
        ((42, 0), 3166309114763032834),
        ((42, 1), 9018399064009245349),
        ((0, 42), 9163314108361167666),
        ((42, 3, 7), 278938599430260618),
        ((-1, 2**70), 3377987053190985883),
    ],
)
def test_a_seed_never_changes(words: tuple[int, ...], value: int) -> None:
    assert mix(*words) == value


def test_seeds_are_whole_numbers_that_torch_and_numpy_take() -> None:
    for words in ((0,), (2**64 - 1, 2**64 - 1), (-5, 3), (10**30,)):
        assert 0 <= mix(*words) < 2**63


def test_seeds_of_neighbours_differ_in_about_half_of_their_bits() -> None:
    points = list(itertools.product(range(4), range(20), range(20)))
    seeds = {point: mix(*point) for point in points}
    assert len(set(seeds.values())) == len(points)
    flips = [
        (seeds[seed, step, micro] ^ seeds[near]).bit_count()
        for seed, step, micro in points
        for near in ((seed + 1, step, micro), (seed, step + 1, micro), (seed, step, micro + 1))
        if near in seeds
    ]
    assert 31.3 < sum(flips) / len(flips) < 31.7  # of 63 bits
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds.values()) / len(seeds)
        assert 0.44 < share < 0.56


def test_order_and_number_of_words_matter() -> None:
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(0, 1, 2), mix(3)}) == 6


def test_a_pass_drops_the_same_whatever_was_drawn_before() -> None:
    first = dropped(42, 3, 1)
    torch.rand(17)
    assert torch.equal(dropped(42, 3, 1), first)
    assert 64 < first.count_nonzero() < 192


@pytest.mark.parametrize("other", [(43, 3, 1), (42, 4, 1), (42, 3, 2), (42, 1, 3), (3, 42, 1)])
def test_another_seed_step_or_micro_batch_drops_otherwise(other: tuple[int, int, int]) -> None:
    agreeing = (dropped(42, 3, 1) == dropped(*other)).float().mean()
    assert 0.3 < agreeing < 0.7
