"""Horovod's optimizer: gradients reduced behind the backward pass."""

import pytest
import torch
from hvd_optimizer_work import (
    accumulate,
    break_the_protocol,
    clip,
    convolve_with_channels_last,
    embed,
    look_at_the_class,
    miss_gradients,
    network,
    sgd,
    step_with_a_closure,
    synchronize_and_step,
    take_turns,
    train_in_all_ways,
    train_one_elastic_rank,
    use_mixed_numbers_in_a_group,
    work_in_a_process_set,
)
from rank_jobs import run_ranks

from tutti.horovod.gradients import Compression
from tutti.horovod.torch.ops import Sum
from tutti.horovod.torch.optimizer import DistributedOptimizer, form_units

pytestmark = pytest.mark.ranks


def test_ranks_with_different_data_end_with_the_weights_of_one_process_with_all_data() -> None:
    first, second = run_ranks(2, train_in_all_ways, 5)
    assert first == second
    right = first.pop("one process")
    half = first.pop("fp16")
    for way, weights in first.items():
        assert weights == pytest.approx(right, rel=1e-5, abs=1e-6), way
    assert half == pytest.approx(right, rel=1e-2, abs=1e-3)
    assert half != first["plain"]


def test_passes_are_summed_and_ranks_averaged() -> None:
    run_ranks(2, accumulate)


def test_clipping_between_synchronize_and_step_equals_one_process() -> None:
    run_ranks(2, clip)


def test_a_step_after_synchronize_warns_once_and_reduces_again() -> None:
    for first, ratios, second in run_ranks(2, synchronize_and_step):
        assert len(first) == 1
        assert first[0].startswith("optimizer.step() called without optimizer.skip_synchronize() context")
        assert ratios == pytest.approx([4.0] * 4)
        assert second == []


def test_zeroing_gradients_on_their_way_and_too_many_passes_are_assertion_errors() -> None:
    for zeroed, passes, accumulating, graph in run_ranks(2, break_the_protocol):
        assert zeroed[0] == "AssertionError" and zeroed[1].startswith(
            "optimizer.zero_grad() was called after loss.backw"
        )
        assert passes[0] == "AssertionError" and "more than backward_passes_per_step times" in passes[1]
        assert accumulating == zeroed
        assert graph[0] == "AssertionError" and "create_graph=True" in graph[1]


def test_a_gradient_that_one_rank_lacks_counts_as_zero_and_frozen_weights_stay() -> None:
    run_ranks(2, miss_gradients)


def test_weights_may_be_frozen_and_thawed_after_wrapping() -> None:
    run_ranks(2, take_turns)


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"groups": 1}], ids=str)
def test_sparse_gradients_equal_dense_ones_of_all_data(options: dict) -> None:
    run_ranks(2, embed, options)


def test_gradients_with_channels_last_keep_their_layout() -> None:
    run_ranks(2, convolve_with_channels_last)


def test_a_group_of_mixed_numbers_keeps_their_precision() -> None:
    assert run_ranks(2, use_mixed_numbers_in_a_group) == [["torch.float32", "torch.float64"]] * 2


def test_a_closure_is_followed_by_the_reduction() -> None:
    run_ranks(2, step_with_a_closure)


def test_a_rank_outside_the_process_set_trains_alone() -> None:
    run_ranks(3, work_in_a_process_set)


def test_the_wrapped_optimizer_is_one_of_its_class_with_the_same_groups_and_options() -> None:
    (found,) = run_ranks(1, look_at_the_class)
    wrapped_twice = found.pop("wrapped twice")
    assert wrapped_twice[0] == "ValueError" and "distributed already" in wrapped_twice[1]
    assert found == {
        "name": "Adagrad",
        "module": DistributedOptimizer.__module__,
        "is an Adagrad": True,
        "shares groups": True,
        "lr": 0.03,
        "defaults": 0.3,
        "steps": [1.0, 0.0],
        "names": ["0.bias", "0.weight", "2.bias", "2.weight"],
        "hooks": ["before"],
        "least sum": True,
        "adasum": "SGD",
    }


def test_a_single_elastic_rank_has_hooks() -> None:
    ((kind, _),) = run_ranks(1, train_one_elastic_rank)
    assert kind == "AssertionError"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_predivide_factor": 2.0, "op": Sum}, "not supported with op != Average"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0 must be > 0"),
        ({"named_parameters": ["weight"]}, "should be a sequence of tuples"),
        ({"named_parameters": [("a", torch.ones(1)), ("a", torch.ones(1))]}, "Found duplicates: a"),
        ({"named_parameters": [("a", torch.ones(1))]}, "one or more model parameters were not named"),
        ({"groups": 0}, "groups=0: expected a positive number"),
        ({"groups": "two"}, "groups='two': expected a positive number"),
        ({"groups": [["weight"]]}, "groups must consist of torch.Tensor"),
        ({"groups": [[ONE := torch.ones(1)], [ONE]]}, "A parameter can only appear once in groups"),
        ({}, "Horovod has not been initialized; use hvd.init()."),
    ],
)
def test_wrong_arguments_are_refused_before_init(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        DistributedOptimizer(sgd(network()), **options)


def test_num_groups_is_an_old_name_of_groups() -> None:
    with pytest.warns(DeprecationWarning, match="replaced by `groups`"), pytest.raises(ValueError, match="groups=-1"):
        DistributedOptimizer(sgd(network()), num_groups=-1)


def test_a_number_of_groups_makes_contiguous_parts_that_differ_by_one_at_most() -> None:
    parameters = [torch.ones(1) for _ in range(7)]
    parts = form_units(parameters, 3)
    assert [len(part) for part in parts] == [3, 2, 2]
    assert all(one is other for one, other in zip(parameters, [each for part in parts for each in part], strict=True))


def test_fp16_compression_restores_the_type_and_leaves_whole_numbers_alone() -> None:
    for dtype, travelling in ((torch.float64, torch.float16), (torch.int64, torch.int64)):
        compressed, context = Compression.fp16.compress(torch.tensor([3, 4], dtype=dtype))
        assert compressed.dtype == travelling
        restored = Compression.fp16.decompress(compressed, context)
        assert restored.dtype == dtype and restored.tolist() == [3, 4]
    tensor = torch.ones(1)
    assert Compression.none.compress(tensor)[0] is tensor
