"""Adasum: what it computes, for tensors and for the steps of an optimizer."""

from typing import Any

import hvd_sets_work as work
import pytest
import torch
from rank_jobs import run_ranks

from tutti.horovod.engine.execute import combine

pytestmark = pytest.mark.ranks

TOLERANCES = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-6, "float64": 1e-14}  # of numbers of about 2


def same(found: list[Any]) -> Any:
    """What is the same on all ranks, to the bit."""
    assert all(each == found[0] for each in found)
    return found[0]


def test_parallel_vectors_are_averaged_and_orthogonal_ones_added() -> None:
    a, b = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert combine(a, b).tolist() == [2.0, 3.0]
    assert combine(a, 3 * a).tolist() == [4.0, 0.0]
    assert combine(a, -a).tolist() == [0.0, 0.0]
    assert combine(a, torch.zeros(2)).tolist() == combine(torch.zeros(2), a).tolist() == [2.0, 0.0]
    assert combine(torch.zeros(2), torch.zeros(2)).tolist() == [0.0, 0.0]


def test_a_vector_much_shorter_than_the_other_counts_by_its_direction() -> None:
    short, long = torch.full((4,), 1e-30), torch.full((4,), 1e15)
    assert combine(short, long).tolist() == pytest.approx([5e14] * 4)  # the mean, without an overflow in between


def test_half_precision_does_not_overflow_in_between() -> None:
    large = torch.full((1000,), 6e4, dtype=torch.float16)
    assert torch.equal(combine(large, large), large)


@pytest.mark.parametrize("size", [2, 4])
def test_all_forms_agree_with_what_is_computed_by_hand(size: int) -> None:
    found = same(run_ranks(size, work.combine_vectors))
    together, grouped = found.pop("together")
    assert together == grouped
    for kind, (error, _) in found.items():
        assert error < TOLERANCES[kind], kind


def test_vectors_that_need_care() -> None:
    found = same(run_ranks(4, work.combine_special_vectors))
    assert found["same"] == pytest.approx([3.0, -4.0])
    assert found["orthogonal"] == [1.0] * 4
    assert found["zeros"] == [0.0, 0.0]
    assert found["one has zeros"] == [2.0, 4.0]
    assert found["empty"] == []
    assert found["scaled"] == pytest.approx([3.0, 6.0])
    assert found["whole numbers"][0] == "ValueError" and "expected floating-point numbers" in found["whole numbers"][1]


def test_numbers_of_ranks_that_cannot_be_paired_are_refused() -> None:
    tensor, optimizer, afterwards = same(run_ranks(3, work.combine_on_three_ranks))
    for kind, text in (tensor, optimizer):
        assert kind == "NotImplementedError" and "op=Adasum on 3 ranks: expected 2, 4, 8" in text
    assert afterwards == 1.0


def test_a_process_set_of_some_ranks_is_refused() -> None:
    *refused, _ = run_ranks(3, work.combine_in_a_set)
    kind, text = same(refused)
    assert kind == "NotImplementedError" and "expected the set of all ranks" in text


def test_weights_move_by_the_adasum_of_the_steps_of_all_ranks() -> None:
    found = same(run_ranks(2, work.train_with_adasum))
    assert len(found) == 2 * len(work.OPTIMIZERS)
    for way, (weights, right) in found.items():
        assert weights == pytest.approx(right, rel=1e-4, abs=1e-6), way


def test_the_optimizer_moves_weights_only_in_step() -> None:
    found = same(run_ranks(2, work.look_at_the_adasum_optimizer))
    assert found["class"] == ("SGD", True, "_DistributedAdasumOptimizer")
    assert found["unmoved"]
    assert {found[each][0] for each in ("zeroed", "skipped", "too many")} == {"AssertionError"}
    assert "Skipping synchronization is not supported" in found["skipped"][1]
    weights, loss, last_layer_stays = found["after"]
    assert weights != found["moved"] and loss == 5.0 and last_layer_stays
