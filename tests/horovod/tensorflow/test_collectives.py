"""Horovod's collectives on TensorFlow's tensors: eager and in functions, on real ranks."""

import functools
from typing import Any

import pytest
from rank_jobs import InTensorFlow, run_in_tensorflow

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("tensorflow")]
work = InTensorFlow("hvd_tensorflow_work")
run_ranks = run_in_tensorflow
SCALES = ("prescale_factor=1.0", "postscale_factor=1.0")
DEVICES = ("device_dense=''", "device_sparse=''")
SCOPE = "ignore_name_scope=False"
TAPE = (
    *("gradtape", *DEVICES, "compression=none", "sparse_as_dense=False", "op=0", "gradient_predivide_factor=1.0"),
    *("num_groups=0", "groups=None", "process_set"),
)
REDUCED = ("average=None", *DEVICES, "compression=none", "op=None", *SCALES)
SIGNATURES: dict[str, tuple[str, ...]] = {
    "init": ("comm=None", "process_sets=None"),
    "allreduce": ("tensor", *REDUCED, "name=None", "process_set", SCOPE),
    "grouped_allreduce": ("tensors", *REDUCED, "process_set", SCOPE, "name=None"),
    "allgather": ("tensor", "name=None", SCOPE, "process_set"),
    "grouped_allgather": ("tensors", "name=None", SCOPE, "process_set"),
    "broadcast": ("tensor", "root_rank", "name=None", SCOPE, "process_set"),
    "broadcast_": ("variables", "root_rank", "name=None", "process_set"),
    "alltoall": ("tensor", "splits=None", "name=None", SCOPE, "process_set"),
    "reducescatter": (
        *("tensor", "device_dense=''", "compression=none", "op=0", "name=None", "process_set", SCOPE, *SCALES),
    ),
    "grouped_reducescatter": ("tensors", "device_dense=''", "compression=none", "op=0", "process_set", *SCALES),
    "broadcast_variables": ("variables", "root_rank", "process_set", "inplace=False"),
    "broadcast_global_variables": ("root_rank",),
    "broadcast_object": ("obj", "root_rank=0", "session=None", "name=None", "process_set"),
    "broadcast_object_fn": ("root_rank=0", "session=None", "name=None", "process_set"),
    "allgather_object": ("obj", "session=None", "name=None", "process_set"),
    "join": (),
    "size_op": ("process_set_id=0", "name=None"),
    "local_size_op": ("name=None",),
    "rank_op": ("name=None",),
    "local_rank_op": ("name=None",),
    "process_set_included_op": ("process_set_id=0", "name=None"),
    "DistributedGradientTape": (*TAPE, "scale_local_gradients=True"),
    "PartialDistributedGradientTape": (*TAPE, "local_layers=None", "scale_local_gradients=True"),
    "DistributedOptimizer": (
        *("optimizer", "name=None", "use_locking=False", *DEVICES, "compression=none", "sparse_as_dense=False"),
        *("backward_passes_per_step=1", "op=0", "gradient_predivide_factor=1.0"),
        *("average_aggregated_gradients=False", "num_groups=0", "groups=None", "process_set"),
        "scale_local_gradients=True",
    ),
}
FORMS = ("eager", "function")


@functools.cache
def signatures() -> dict[str, tuple[str, ...]]:
    return run_ranks(1, work.signatures, tuple(SIGNATURES))[0]


def same(found: list[Any]) -> Any:
    """What is the same on all ranks."""
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_have_horovods_arguments_in_its_order(name: str) -> None:
    assert signatures()[name] == SIGNATURES[name]


def test_init_leaves_tensorflows_threads_to_the_script() -> None:
    assert same(run_ranks(2, work.leave_the_context_alone)) == (True, 1)


@pytest.mark.parametrize("form", FORMS)
def test_every_type_is_reduced_alone_and_in_a_group(form: str) -> None:
    assert same(run_ranks(2, work.reduce_all_types, form)) == []


@pytest.mark.parametrize("form", FORMS)
def test_every_type_is_gathered_sent_and_exchanged(form: str) -> None:
    assert same(run_ranks(2, work.move_all_types, form)) == []


@pytest.mark.parametrize("form", FORMS)
def test_gradients_go_back_through_every_collective(form: str) -> None:
    first, second = run_ranks(2, work.follow_gradients, form)
    for rank, found in enumerate((first, second)):
        assert found["allreduce"] == [[3, 3], [3, 3]]  # the sum over ranks of their weights, 1 and 2
        assert found["grouped"] == [[3, 3], [3, 3]]  # twice the mean
        assert found["allgather"] == [[1.5, 1.5], [1.5, 1.5]]
        assert found["broadcast"] == ([[1.5, 1.5]] * 2 if rank else [[0, 0]] * 2)
        assert found["alltoall"] == [[1, 1], [0, 0]]  # the first row went to rank 0, whose weight is 1
        assert found["reducescatter"] == [[2, 2], [4, 4]]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_tables_are_gathered(form: str) -> None:
    values, indices, total, wrong = same(run_ranks(2, work.reduce_slices, form))
    assert (values, indices) == ([[0.5, 0.5], [1, 1], [1, 1]], [0, 0, 1])
    assert total == [[3, 3], [2, 2], [0, 0], [0, 0]]
    assert wrong[0] == "NotImplementedError" and "sparse_as_dense=True" in wrong[1]


def test_ranks_meet_whatever_the_order_in_which_they_trace() -> None:
    one, other, many = same(run_ranks(2, work.meet_in_another_order))
    assert (one, other) == (3, 2)
    assert many == [[3 * number for number in range(8)]] * 2


def test_results_that_a_graph_leaves_out_hold_nobody_up() -> None:
    assert same(run_ranks(2, work.leave_results_unused)) == [2.5 + step for step in range(40)]


def test_what_differs_over_ranks_is_an_error_on_all_of_them() -> None:
    first, second = run_ranks(2, work.disagree)
    for found in (first, second):
        for name, text in {
            "shapes": "mismatched shapes: rank 0 has (2,), rank 1 has (3,)",
            "types": "mismatched data types: rank 0 has float32, rank 1 has int32",
            "root": "mismatched root ranks",
            "group": "mismatched shapes of tensor 1: rank 0 has (2, 3), rank 1 has (3, 3)",
            "no rows": "without dimensions",
            "function": "rank 1 has (3,)",
        }.items():
            assert found[name][0] == "FailedPreconditionError" and text in found[name][1], name
        assert found["splits"][0] == "InvalidArgumentError" and "splits [1, 2]" in found["splits"][1]
        assert found["op"][0] == "ValueError" and "op=9" in found["op"][1]
        assert found["type"][0] == "InvalidArgumentError" and "is not supported" in found["type"][1]


def test_a_rank_that_dies_ends_the_others_with_its_name() -> None:
    found = run_ranks(3, work.lose_a_rank, "function", expect_failure=True)
    for survivor in found[:2]:
        assert survivor.startswith("UnknownError") and "rank 2 has not responded" in survivor, survivor


def test_a_copy_that_fails_is_an_error_on_all_ranks() -> None:
    first, second = run_ranks(2, work.fail_a_copy)
    assert second == ("MemoryError", "by plan")
    assert first[0] == "UnknownError" and "allreduce.a failed" in first[1], first


def test_objects_questions_and_ranks_without_data() -> None:
    first, second = run_ranks(2, work.use_objects_and_sets)
    assert first[:3] == second[:3] == [{"rank": 1}, [0, 1], [0]]
    assert (first[3], second[3]) == ([2, 0, 2], [2, 1, 2])
    assert first[4] == [0.5, 0.5]
    assert first[-1] == second[-1] == 0


def test_a_process_set_is_for_its_ranks() -> None:
    first, second = run_ranks(2, work.use_a_process_set)
    assert first == [1, -1, [1, 1], 2]
    assert second == [0, -1, "InvalidArgumentError", 4]


def test_memory_for_results_is_used_again_when_nobody_has_them() -> None:
    for pieces, right in run_ranks(2, work.reuse_memory):
        assert right and pieces <= 4
