"""Habits of Horovod that scripts rely on, and where they meet torch's."""

import hvd_conformance_work as work
import pytest
import torch
from rank_jobs import run_ranks

from tutti.horovod.engine.execute import combine


@pytest.mark.ranks
def test_sparse_gradients_that_travel_dense_are_sparse_again_for_the_step() -> None:
    assert run_ranks(2, work.step_sparsely) == [[([True] * 3, [[1, 2, 9], [0, 1], [4, 5]])] * 3] * 2


@pytest.mark.ranks
def test_no_collective_warns() -> None:
    first, second = run_ranks(2, work.exchange_without_warnings)
    assert first[:3] == second[:3] == [[[0.5, 1.5], [2.5, 3.5]], [[0, 1], [1, 2], [3, 4]], [[1, 2], [3, 4]]]
    assert first[3:] == [[[0.5, 1.5]], [[0, 1], [1, 2]]]
    assert second[3:] == [[[2.5, 3.5]], [[2, 3], [3, 4]]]


@pytest.mark.ranks
def test_a_gradient_through_one_tensor_of_a_group_leaves_the_others_at_zero() -> None:
    assert run_ranks(2, work.follow_one_output_of_a_group) == [[[[0, 0], [3, 3]]] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_adasum_averages_parallel_vectors_whatever_their_lengths(dtype: torch.dtype) -> None:
    direction = torch.randn(1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers = torch.finfo(dtype)
    for short, long in [(1.0, 1.0), (numbers.tiny**0.75, numbers.max**0.375), (numbers.tiny, 1.0)]:
        a, b = (direction * short).to(dtype), (direction * long).to(dtype)
        mean = ((a.double() + b.double()) / 2).to(dtype)
        tolerance = 4 * numbers.eps * float(mean.abs().max())
        for found in (combine(a, b), combine(b, a)):
            torch.testing.assert_close(found, mean, rtol=4 * numbers.eps, atol=tolerance)
