"""Horovod's names for PyTorch: all are there, with the arguments and defaults that scripts rely on."""

import inspect
from typing import Any

import hvd_sets_work as work
import pytest
from rank_jobs import run_ranks

import tutti.horovod.torch as hvd
from tutti.horovod.torch import ops

pytestmark = pytest.mark.ranks

EVERYONE = hvd.global_process_set
SCALES = ("prescale_factor=1.0", "postscale_factor=1.0")
REDUCED = ("average=None", "name=None", "op=None", *SCALES, "process_set")
COMPRESSED = ("average=None", "name=None", "compression=none", "op=None", *SCALES, "process_set")
SCATTERED = ("op=0", "process_set", *SCALES)
SIGNATURES: dict[str, tuple[str, ...]] = {
    "init": ("comm=None", "process_sets=None"),
    "start_timeline": ("file_path", "mark_cycles=False"),
    "ProcessSet": ("ranks_or_comm",),
    "add_process_set": ("process_set",),
    "remove_process_set": ("process_set",),
    "allreduce": ("tensor", *COMPRESSED),
    "allreduce_": ("tensor", *REDUCED),
    "allreduce_async": ("tensor", *REDUCED),
    "allreduce_async_": ("tensor", *REDUCED),
    "grouped_allreduce": ("tensors", *COMPRESSED),
    "grouped_allreduce_": ("tensors", *REDUCED),
    "grouped_allreduce_async": ("tensors", *REDUCED),
    "grouped_allreduce_async_": ("tensors", *REDUCED),
    "sparse_allreduce_async": ("tensor", "name", "op", "process_set"),
    "allgather": ("tensor", "name=None", "process_set"),
    "allgather_async": ("tensor", "name=None", "process_set"),
    "grouped_allgather": ("tensors", "name=None", "process_set"),
    "grouped_allgather_async": ("tensors", "name=None", "process_set"),
    "broadcast": ("tensor", "root_rank", "name=None", "process_set"),
    "broadcast_": ("tensor", "root_rank", "name=None", "process_set"),
    "broadcast_async": ("tensor", "root_rank", "name=None", "process_set"),
    "broadcast_async_": ("tensor", "root_rank", "name=None", "process_set"),
    "alltoall": ("tensor", "splits=None", "name=None", "process_set"),
    "alltoall_async": ("tensor", "splits=None", "name=None", "process_set"),
    "reducescatter": ("tensor", "name=None", "compression=none", *SCATTERED),
    "reducescatter_async": ("tensor", "name=None", *SCATTERED),
    "grouped_reducescatter": ("tensors", "name=None", "compression=none", *SCATTERED),
    "grouped_reducescatter_async": ("tensors", "name=None", *SCATTERED),
    "poll": ("handle",),
    "synchronize": ("handle",),
    "join": ("device=-1",),
    "barrier": ("process_set",),
    "broadcast_parameters": ("params", "root_rank"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", "model=None"),
    "broadcast_object": ("obj", "root_rank=0", "name=None", "process_set"),
    "allgather_object": ("obj", "name=None"),
    "DistributedOptimizer": (
        "optimizer",
        "named_parameters=None",
        "compression=none",
        "backward_passes_per_step=1",
        "op=0",
        "gradient_predivide_factor=1.0",
        "num_groups=0",
        "groups=None",
        "sparse_as_dense=False",
        "process_set",
    ),
    "SyncBatchNorm": ("num_features", "eps=1e-05", "momentum=0.1", "affine=True", "track_running_stats=True"),
}
WITHOUT_ARGUMENTS = (
    *("shutdown", "is_initialized", "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank"),
    *("is_homogeneous", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
    *("ddl_built", "ccl_built", "cuda_built", "rocm_built", "nccl_built", "stop_timeline", "sycl_built"),
)


def same(found: list[Any]) -> Any:
    """What is the same on all ranks."""
    assert all(each == found[0] for each in found)
    return found[0]


def written(parameter: inspect.Parameter) -> str:
    """An argument with its default as in the table; a process set is that of all ranks, or has no default."""
    if parameter.default is inspect.Parameter.empty or parameter.default is EVERYONE:
        return parameter.name
    is_none = parameter.default is hvd.Compression.none
    return f"{parameter.name}={'none' if is_none else repr(parameter.default)}"


@pytest.mark.parametrize("name", [*SIGNATURES, *WITHOUT_ARGUMENTS])
def test_names_have_horovods_arguments_in_its_order(name: str) -> None:
    found = inspect.signature(getattr(hvd, name)).parameters
    assert tuple(written(each) for each in found.values()) == SIGNATURES.get(name, ())
    if "process_set" in found and name not in ("add_process_set", "remove_process_set"):
        assert found["process_set"].default is EVERYONE


def test_reductions_are_numbers_and_errors_have_names() -> None:
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == tuple(range(6))
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert hvd.HostsUpdatedInterrupt(skip_sync=True).skip_sync
    assert EVERYONE.process_set_id == 0


def test_what_was_built_can_be_asked_before_init() -> None:
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not any(ask() for ask in (hvd.mpi_built, hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built))
    assert isinstance(hvd.nccl_built(), int)
    with pytest.raises(ValueError, match="not been built with MPI"):
        hvd.mpi_threads_supported()
    for ask in (hvd.rank, hvd.is_homogeneous, hvd.stop_timeline, ops._basics._get_process_set_ids_and_ranks):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd\.init"):
            ask()


def test_several_tensors_are_gathered_and_scattered_as_one_unit() -> None:
    found = run_ranks(2, work.group_rows)
    for rank, each in enumerate(found):
        assert each["gathered"] == [[1.0], [0.0, 1.0, 1.0]]
        # The mean over ranks of 1, and of 2 (rank + 1).
        assert each["gradients"] == [[[1.0, 1.0]] * rank, [[3.0, 3.0]] * (rank + 1)]
        assert each["asynchronous"] == [[0, 1], [0, 1]]
        assert each["none"] == ([], [])
        assert each["wrong"][0] == "HorovodInternalError" and "without dimensions" in each["wrong"][1]
        assert each["scattered"] == ([[0.0, 4.0], [0.0]] if rank == 0 else [[8.0], [4.0]])
        # Twice for the prescale, twice for the sum over two ranks, and the number of the rank that has the row.
        assert each["scattered gradients"] == [[4.0, 4.0, 8.0], [4.0, 8.0]]
        assert [str(kind) for kind in each["half"]] == ["torch.float32"]
        assert each["mean"] == [[1.0]]


def test_handles_are_counted_from_0_in_each_job() -> None:
    first, second = same(run_ranks(2, work.count_handles))
    assert second == [0, 1, 2]
    assert len(first) == 3


def test_average_is_the_old_way_to_say_which_reduction() -> None:
    found, both = same(run_ranks(2, work.say_average))
    warned = [("DeprecationWarning", "hvd_sets_work.py")]
    assert found == [(1.0, warned), (2.0, warned)] * 3
    assert both == ("ValueError", "The op parameter supersedes average. Please provide only one of them.")


def test_tensors_without_dimensions_of_booleans_and_of_bfloat16() -> None:
    first, second = run_ranks(2, work.use_small_and_unusual_tensors)
    assert first.pop("swapped") == [False, True] and second.pop("swapped") == [True, True]
    found = same([first, second])
    assert found["scalar"] == () and found["broadcast"] == 1
    assert found["gathered"] == [False, True, True, True] and found["from 1"] == [True, True]
    assert found["bf16"] == "torch.bfloat16"
    assert found["no rows"][0] == "HorovodInternalError"
    assert found["sparse"] == [[2.0, 0.0], [0.0, 2.0]]
