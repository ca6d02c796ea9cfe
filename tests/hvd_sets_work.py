"""What ranks do in the tests of changing process sets, Adasum, the timeline and names of the API."""

import functools
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hvd_jobs import in_a_job, refused

import tutti.horovod.torch as hvd
from tutti.horovod import basics
from tutti.horovod.engine import execute
from tutti.horovod.torch import ops
from tutti.horovod.torch.ops import synchronize

KINDS = ("float16", "bfloat16", "float32", "float64")


def in_a_dynamic_job(work: Callable[..., Any]) -> Callable[..., Any]:
    """Process sets may change in it."""

    @functools.wraps(work)
    def whole(*arguments: Any) -> Any:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        return in_a_job(work)(*arguments)

    return whole


def total(process_set: hvd.ProcessSet, name: str | None = None) -> list[float]:
    """This rank's number and one added up over a set, or nothing where this rank is not in it."""
    if not process_set.included():
        return []
    return hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), name=name, op=hvd.Sum, process_set=process_set).tolist()


# Process sets.


def add_and_remove() -> dict[str, Any]:
    """In a job of four ranks with a static set."""
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    static = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[static])
    even = hvd.add_process_set([2, 0])
    odd = hvd.add_process_set(hvd.ProcessSet([1, 3]))
    found: dict[str, Any] = {
        "repr": [repr(static), repr(even), repr(odd)],
        "all": ops._basics._get_process_set_ids_and_ranks(),
        "sums": [total(each, "x") for each in (even, odd, static)],
        "again": [total(each, "x") for each in (even, odd, static)],
        "twice": refused(lambda: hvd.add_process_set([0, 2])),
        "everyone": refused(lambda: hvd.add_process_set(range(4))),
        "nobody": refused(lambda: hvd.add_process_set([])),
        "too many": refused(lambda: hvd.add_process_set([3, 4])),
        "removed": [hvd.remove_process_set(even), hvd.remove_process_set(even)],
        "global": hvd.remove_process_set(hvd.global_process_set),
        "unknown": hvd.remove_process_set(hvd.ProcessSet([1, 3])),
        "gone": (even.process_set_id, refused(lambda: total(even))),
    }
    most = hvd.add_process_set([0, 2, 3])  # the number is free again, and other ranks know its requests
    found["numbers"] = (most.process_set_id, hvd.add_process_set(even).process_set_id)
    found["after"] = [total(each, "x") for each in (most, even, odd, static)]
    found["static"] = (hvd.remove_process_set(static), ops._basics._get_process_set_ids_and_ranks())
    hvd.barrier()
    hvd.shutdown()
    found["end"] = (even.process_set_id, refused(lambda: hvd.add_process_set([0])))
    return found


@in_a_dynamic_job
def disagree_about_sets() -> list[Any]:
    rank = hvd.rank()
    found: list[Any] = [refused(lambda: hvd.add_process_set([0] if rank else [1]))]
    one = hvd.add_process_set([1])
    found.append(refused(lambda: hvd.add_process_set([1] if rank else [0])))  # which is there already on one rank
    found.append(refused(lambda: hvd.remove_process_set(one) if rank else hvd.add_process_set([0])))
    found.append((one.process_set_id, total(hvd.global_process_set)))
    return [*found, hvd.remove_process_set(one)]


@in_a_dynamic_job
def change_sets_many_times(rounds: int) -> list[Any]:
    """While another thread works on all ranks."""
    sums: list[float] = []

    def work() -> None:
        for turn in range(40):
            sums.append(hvd.allreduce(torch.ones(1), name=f"{turn}", op=hvd.Sum).item())

    thread = threading.Thread(target=work)
    thread.start()
    found = []
    for turn in range(rounds):
        each = hvd.add_process_set([turn % 3, 2] if turn % 3 < 2 else [0, 1])
        found.append((each.process_set_id, total(each, "x"), total(each)))
        hvd.remove_process_set(each)
    thread.join()
    return [found, set(sums), len(basics.engine()._numbers)]


@in_a_dynamic_job
def remove_a_set_in_use() -> Any:
    """Rank 0 waits for an operation that rank 1 never submits."""
    both = hvd.add_process_set([0, 1])
    handle = ops.allreduce_async(torch.ones(1), name="x", process_set=both) if hvd.rank() == 0 else -1
    hvd.remove_process_set(both)
    error = refused(lambda: synchronize(handle)) if handle >= 0 else None
    again = hvd.add_process_set([0, 1])
    return error, total(again, "x") if hvd.rank() < 2 else None


@in_a_dynamic_job
def change_sets_while_a_rank_has_joined() -> Any:
    error = refused(lambda: hvd.add_process_set([0])) if hvd.rank() == 0 else None
    hvd.join()
    return error, hvd.add_process_set([0]).process_set_id


def init_again_after_an_error() -> Any:
    """An init with a process set twice, and a valid one after it."""
    wrong = refused(lambda: hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])]))
    initialized = hvd.is_initialized()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets)
    total = hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum).item()
    found = wrong, initialized, [each.process_set_id for each in sets], total
    hvd.barrier()
    hvd.shutdown()
    return found


@in_a_job
def change_sets_in_a_static_job() -> Any:
    return refused(lambda: hvd.add_process_set([0])), hvd.remove_process_set(hvd.ProcessSet([0]))


def ask_for_dynamic_sets() -> Any:
    found: list[Any] = [refused(lambda: hvd.init(process_sets="changing"))]
    hvd.init(process_sets="dynamic")
    found.append(hvd.add_process_set([0]).process_set_id)
    hvd.barrier()
    hvd.shutdown()
    return found


# Adasum.


def vector(rank: int, dtype: torch.dtype, length: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def by_hand(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours first, in double precision."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b)) for a, b in pairs]
    return vectors[0]


@in_a_job
def combine_vectors() -> dict[str, Any]:
    """How far all forms are from what is computed by hand, and the numbers themselves."""
    rank, size, found = hvd.rank(), hvd.size(), {}
    execute.CHUNK = 16  # several in each vector
    for kind in KINDS:
        dtype = getattr(torch, kind)
        right = [by_hand([vector(r, dtype, seed=i).double() for r in range(size)]) for i in range(3)]
        mine = [vector(rank, dtype, seed=i) for i in range(3)]
        inside = [each.clone() for each in mine]
        results = [
            hvd.allreduce(mine[0], op=hvd.Adasum),
            hvd.allreduce_(inside[1], op=hvd.Adasum),
            synchronize(hvd.allreduce_async(mine[2].view(5, 10), op=hvd.Adasum)).view(-1),
            *hvd.grouped_allreduce(mine, op=hvd.Adasum),
        ]
        assert results[1] is inside[1]
        assert torch.equal(mine[0], vector(rank, dtype))
        errors = [(each.double() - r).abs().max().item() for each, r in zip(results, [*right, *right], strict=True)]
        found[kind] = max(errors), [each.tolist() for each in results]
    mine = [vector(rank, torch.float64, seed=i) for i in range(3)]
    handles = [hvd.allreduce_async_(each, name=f"{i}", op=hvd.Adasum) for i, each in enumerate(mine)]
    found["together"] = [synchronize(handle).tolist() for handle in handles], found["float64"][1][3:]
    return found


@in_a_job
def combine_special_vectors() -> dict[str, Any]:
    rank, size = hvd.rank(), hvd.size()

    def reduce(tensor: torch.Tensor, **rest: Any) -> list[float]:
        return hvd.allreduce(tensor, op=hvd.Adasum, **rest).tolist()

    return {
        "same": reduce(torch.tensor([3.0, -4.0])),
        "orthogonal": reduce(torch.eye(size)[rank]),
        "zeros": reduce(torch.zeros(2)),
        "one has zeros": reduce(torch.tensor([2.0, 4.0]) * (rank == 1)),
        "empty": reduce(torch.empty(0)),
        "scaled": reduce(torch.tensor([2.0, 4.0]), prescale_factor=0.5, postscale_factor=3.0),
        "whole numbers": refused(lambda: reduce(torch.ones(2, dtype=torch.int64))),
    }


def combine_in_a_set() -> Any:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if not pair.included():
        hvd.barrier()
        hvd.shutdown()
        return None
    error = refused(lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=pair))
    hvd.barrier()
    hvd.shutdown()
    return error


@in_a_job
def combine_on_three_ranks() -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    return (
        refused(lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum)),
        refused(lambda: hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)),
        hvd.allreduce(torch.ones(1)).item(),
    )


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def numbers(model: torch.nn.Module) -> list[float]:
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()]).tolist()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
}


@in_a_job
def train_with_adasum() -> dict[str, Any]:
    """The weights after some steps, and those of a process that plays all ranks, for each optimizer."""
    found = {}
    for kind, options in OPTIMIZERS.items():
        for passes in (1, 2):
            model = network()
            groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
            plain = getattr(torch.optim, kind)(groups, **options)
            optimizer = hvd.DistributedOptimizer(
                plain, model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
            )
            for step in range(3):
                optimizer.zero_grad()
                for place in range(passes):
                    model(batch(hvd.rank(), 2 * step + place)).square().mean().backward()
                if step == 1:
                    optimizer.synchronize()
                optimizer.step()
            found[kind, passes] = numbers(model), play_all_ranks(kind, options, passes)
    return found


def play_all_ranks(kind: str, options: dict[str, Any], passes: int) -> list[float]:
    """Every rank starts from the common weights with a state of its own; its way is combined with the others'."""
    models = [network() for _ in range(hvd.size())]
    optimizers = [
        getattr(torch.optim, kind)(
            [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}], **options
        )
        for model in models
    ]
    for step in range(3):
        starts = [each.detach().clone() for each in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for place in range(passes):
                model(batch(rank, 2 * step + place)).square().mean().backward()
            optimizer.step()
        for place, start in enumerate(starts):
            own = [list(model.parameters())[place] for model in models]
            way = by_hand([(each.detach() - start).double().reshape(-1) for each in own]).float().view(start.shape)
            for each in own:
                each.data.copy_(start + way)
    return numbers(models[0])


@in_a_job
def look_at_the_adasum_optimizer() -> dict[str, Any]:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum, compression=hvd.Compression.fp16
    )
    before = numbers(model)
    model(batch(hvd.rank(), 0)).square().mean().backward()
    found: dict[str, Any] = {
        "class": (
            type(optimizer).__name__,
            isinstance(optimizer, torch.optim.SGD),
            type(optimizer).__mro__[1].__name__,
        ),
        "unmoved": numbers(model) == before,
        "zeroed": refused(optimizer.zero_grad),
        "skipped": refused(optimizer.skip_synchronize),
        "too many": refused(lambda: model(batch(0, 0)).square().mean().backward()),
    }
    optimizer.step()
    found["moved"] = numbers(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    if hvd.rank() == 0:  # the others have no gradients
        model[0](batch(0, 1)).square().mean().backward()
    last = numbers(model)[-2:]
    loss = optimizer.step(lambda: 5.0)
    found["after"] = numbers(model), loss, numbers(model)[-2:] == last
    return found


# The timeline.


def write_a_timeline(folder: str, variables: dict[str, str]) -> None:
    os.environ |= variables
    hvd.init(process_sets=[hvd.ProcessSet([1, 2])])
    for _ in range(2):
        hvd.allreduce(torch.ones(2, 3), name='x"y', op=hvd.Sum)
    hvd.allgather(torch.ones(hvd.rank(), 2, dtype=torch.int16), name="rows")
    hvd.grouped_allreduce([torch.ones(1), torch.ones(2)], name="g")
    shape = (2,) if hvd.rank() else (3,)
    refused(lambda: hvd.allreduce(torch.ones(shape), name="wrong"))
    pair = basics.job().sets[0]
    if pair.included():
        hvd.allreduce(torch.ones(1), name="x", process_set=pair)
    hvd.barrier()
    hvd.join()
    if hvd.rank() == 2:
        hvd.shutdown()
        return
    refused(lambda: hvd.allreduce(torch.ones(1), name="last"))  # the job is shut down while it waits
    if hvd.rank() == 0:
        Path(folder, "while the job is open").write_bytes(Path(folder, "timeline.json").read_bytes())
    hvd.shutdown()


def write_timelines_by_hand(folder: str) -> list[Any]:
    found: list[Any] = [refused(lambda: hvd.start_timeline("x")), refused(hvd.stop_timeline)]
    hvd.init()
    found.append(refused(lambda: hvd.start_timeline("x")))
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.stop_timeline()
    if hvd.rank() == 0:
        found.append(refused(lambda: hvd.start_timeline(f"{folder}/nowhere/x")))
    for place in range(3):
        hvd.allreduce(torch.ones(1), name=f"before{place}")
        hvd.barrier()
        hvd.start_timeline(f"{folder}/{place}.json", mark_cycles=place == 1)
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name=f"x{place}")
        hvd.barrier()
        if place != 1:  # the next one ends it
            hvd.stop_timeline()
    found.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
    hvd.barrier()
    hvd.shutdown()
    return found


def write_a_timeline_nowhere() -> float:
    os.environ["HOROVOD_TIMELINE"] = "/nowhere/at/all"
    return in_a_job(lambda: hvd.allreduce(torch.ones(1), op=hvd.Sum).item())()


# Names.


@in_a_job
def group_rows() -> dict[str, Any]:
    rank, size = hvd.rank(), hvd.size()
    rows = [torch.full((rank + i, 2), float(rank), requires_grad=True) for i in range(2)]
    gathered = hvd.grouped_allgather(rows, name="g")
    (gathered[0].sum() + 2 * (rank + 1) * gathered[1].sum()).backward()
    found: dict[str, Any] = {
        "gathered": [each[:, 0].tolist() for each in gathered],
        "gradients": [each.grad.tolist() for each in rows if each.grad is not None],
        "asynchronous": [
            each.tolist() for each in synchronize(hvd.grouped_allgather_async([torch.tensor([rank])] * 2))
        ],
        "none": (hvd.grouped_allgather([]), hvd.grouped_reducescatter([])),
        "wrong": refused(lambda: hvd.grouped_allgather([torch.ones(1), torch.tensor(1.0)])),
    }
    given = [torch.arange(3.0), torch.arange(size, dtype=torch.float64)]
    for each in given:
        each.requires_grad_()
    scattered = hvd.grouped_reducescatter(given, name="s", op=hvd.Sum, prescale_factor=2.0)
    (torch.stack([each.sum().double() for each in scattered]).sum() * (rank + 1)).backward()
    found["scattered"] = [each.tolist() for each in scattered]
    found["scattered gradients"] = [each.grad.tolist() for each in given if each.grad is not None]
    found["half"] = [t.dtype for t in hvd.grouped_reducescatter([torch.ones(2)], compression=hvd.Compression.fp16)]
    found["mean"] = [each.tolist() for each in synchronize(hvd.grouped_reducescatter_async([torch.ones(2)]))]
    return found


def count_handles() -> Any:
    found = []
    for _ in range(2):
        hvd.init()
        found.append([hvd.allreduce_async(torch.ones(1)) for _ in range(3)])
        for handle in found[-1]:
            synchronize(handle)
        hvd.barrier()
        hvd.shutdown()
    return found


@in_a_job
def say_average() -> Any:
    """The old way to say it; where the warning points to is the caller's line."""
    found = []
    for call in (hvd.allreduce, hvd.allreduce_, lambda x, **rest: synchronize(hvd.allreduce_async(x, **rest))):
        for average in (True, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                value = call(torch.ones(1), average=average).item()
            found.append((value, [(w.category.__name__, Path(w.filename).name) for w in caught]))
    return found, refused(lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum))


@in_a_job
def use_small_and_unusual_tensors() -> Any:
    rank = hvd.rank()
    bools = torch.tensor([rank == 1, True])
    return {
        "scalar": hvd.allreduce(torch.tensor(2.0 * rank)).shape,
        "broadcast": hvd.broadcast(torch.tensor(rank), 1).item(),
        "gathered": hvd.allgather(bools).tolist(),
        "from 1": hvd.broadcast(bools, 1).tolist(),
        "swapped": hvd.alltoall(bools).tolist(),
        "bf16": str(hvd.reducescatter(torch.ones(2, dtype=torch.bfloat16)).dtype),
        "no rows": refused(lambda: hvd.allgather(torch.tensor(1))),
        "sparse": hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "s", hvd.Sum)().to_dense().tolist(),
    }
