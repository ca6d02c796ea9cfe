"""What ranks do in the tests of the Horovod engine; each function runs on every rank."""

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from hvd_jobs import in_a_job, refused

from tutti.horovod import basics, engine
from tutti.horovod.basics import ProcessSet
from tutti.horovod.engine.messages import HubChannel, Message
from tutti.horovod.torch import ops
from tutti.horovod.torch.ops import Average, Max, Min, Product, Sum, poll, synchronize

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64")


def waits(handle: int) -> tuple[str, str]:
    return refused(lambda: synchronize(handle))


def total(value: float = 1.0, name: str | None = None, **rest: Any) -> float:
    """A number summed over ranks: shows that the job works."""
    return synchronize(ops.allreduce_async(torch.tensor([value]), name=name, op=Sum, **rest)).item()


def after_all_came(what: str) -> None:
    """Meet the other ranks outside the engine."""
    assert basics._group is not None
    basics._group.barrier(what, 30)


# Matching.


@in_a_job
def submit_in_another_order() -> list[float]:
    names = [f"layer{i}" for i in range(20)]
    order = random.Random(basics.rank()).sample(range(20), 20)
    handles = {i: ops.allreduce_async(torch.full((3,), float(i)), name=names[i], op=Sum) for i in order}
    return [synchronize(handles[i])[0].item() for i in range(20)]


@in_a_job
def submit_without_names() -> list[Any]:
    """The same issue order on all ranks, of several kinds and sizes; rank 1 takes the results in another order."""
    mine = torch.tensor([basics.rank() + 1.0])
    handles = [
        ops.allreduce_async(mine, op=Sum),
        ops.allreduce_async(10 * mine, op=Sum),
        ops.broadcast_async(mine, 1),
        ops.allgather_async(mine),
        ops.allreduce_async(100 * mine, op=Sum),
    ]
    order = (4, 3, 2, 1, 0) if basics.rank() == 1 else range(5)
    taken = {place: synchronize(handles[place]).tolist() for place in order}
    return [taken[place] for place in range(5)]


@in_a_job
def reuse_names() -> tuple[list[Any], list[float]]:
    """One name for several kinds at once, and again for the next round."""
    mine = torch.tensor([float(basics.rank())])
    kinds = [
        ops.allreduce_async(mine, name="x", op=Sum),
        ops.allgather_async(mine, name="x"),
        ops.broadcast_async(mine, 1, name="x"),
        ops.reducescatter_async(torch.arange(2.0), name="x", op=Sum),
    ]
    at_once = [synchronize(handle).tolist() for handle in kinds]
    return at_once, [total(turn, "again") for turn in range(5)]


@in_a_job
def submit_a_name_twice() -> tuple[tuple[str, str], float, float]:
    """Rank 0 has the name in flight, since rank 1 has not come to it yet."""
    if basics.rank() == 1:
        after_all_came("the second submission")
        return ("", ""), total(name="x"), total(name="x")
    first = ops.allreduce_async(torch.ones(1), name="x", op=Sum)
    error = refused(lambda: ops.allreduce_async(torch.ones(1), name="x", op=Sum))
    after_all_came("the second submission")
    return error, synchronize(first).item(), total(name="x")


@in_a_job
def submit_from_threads() -> list[float]:
    found: dict[int, float] = {}

    def work(place: int) -> None:
        for turn in range(10):
            found[10 * place + turn] = total(10 * place + turn, f"t{place}.{turn}")

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(80)]


@in_a_job
def submit_many(count: int) -> tuple[list[int], int]:
    """Sums, broadcasts and gathers of many sizes in random order, twice: the second time most names are known."""
    rank, wrong = basics.rank(), []
    for turn in range(2):
        handles = {}
        for i in random.Random(10 * turn + rank).sample(range(count), count):
            if i % 10 == 0:
                handles[i] = ops.broadcast_async(torch.full((1 + i % 7,), i + rank), i % basics.size(), f"op{i}")
            elif i % 10 == 1:
                handles[i] = ops.allgather_async(torch.full((rank,), i), f"op{i}")
            else:
                handles[i] = ops.allreduce_async(torch.full((1 + i % 7,), i + rank), name=f"op{i}", op=Sum)
        size, gathered = basics.size(), sum(range(basics.size()))
        for i, handle in handles.items():
            if i % 10 == 0:
                expected = [i + i % size] * (1 + i % 7)
            elif i % 10 == 1:
                expected = [i] * gathered
            else:
                expected = [size * i + gathered] * (1 + i % 7)
            if synchronize(handle).tolist() != expected:
                wrong.append(i)
    return wrong, len(basics.engine()._numbers)


# What does not agree.


@in_a_job
def disagree() -> tuple[dict[str, tuple[str, str]], float]:
    rank, f = basics.rank(), torch.ones
    reduce, gather, rows = ops.allreduce_async, ops.allgather_async, ops.alltoall_async
    handles = {
        "dtype": reduce(f(2, dtype=(torch.float32, torch.float64)[rank]), name="dtype"),
        "shape": reduce(f(2 + rank), name="shape"),
        "dims": reduce(f((2, 1) if rank else 2), name="dims"),
        "op": reduce(f(2), name="op", op=(Sum, Max)[rank]),
        "prescale": reduce(f(2), name="prescale", op=Sum, prescale_factor=1.0 + rank),
        "postscale": reduce(f(2), name="postscale", op=Sum, postscale_factor=1.0 + rank),
        "root": ops.broadcast_async(f(2), rank, "root"),
        "broadcast": ops.broadcast_async(f(2 + rank), 0, "broadcast"),
        "gather": gather(f(2, 3 + rank), "gather"),
        "gather dims": gather(f((2, 3) if rank else (2,)), "gather dims"),
        "gather dtype": gather(f(2, dtype=(torch.bool, torch.uint8)[rank]), "gather dtype"),
        "gather nothing": gather(torch.tensor(1.0), "gather nothing"),
        "gather little": gather(f(1) if rank else torch.tensor(1.0), "gather little"),
        "alltoall": rows(f(2, 3 + rank), name="alltoall"),
        "alltoall nothing": rows(torch.tensor(1.0), name="alltoall nothing"),
        "scatter": ops.reducescatter_async(f(2 + rank), "scatter"),
        "scatter op": ops.reducescatter_async(f(2), "scatter op", op=(Sum, Average)[rank]),
        "scatter nothing": ops.reducescatter_async(torch.tensor(1.0), "scatter nothing"),
        "group": ops.grouped_allreduce_async([f(2), f(2 + rank)], name="group"),
    }
    if rank:
        handles["grouped"] = ops.grouped_allreduce_async([f(2), f(2)], name="grouped")
    else:
        handles["grouped"] = reduce(f(2), name="grouped_1of2")
    return {name: waits(handle) for name, handle in handles.items()}, total(name="shape")


@in_a_job
def give_wrong_arguments() -> tuple[list[tuple[str, str]], float]:
    """Errors at submission, which no other rank waits for."""
    one, two = torch.ones(1), torch.ones(4, 2)
    wrong: list[Callable[[], Any]] = [
        lambda: ops.allreduce_async(torch.ones(2, dtype=torch.bool)),
        lambda: ops.allreduce_async(torch.ones(2, dtype=torch.complex64)),
        lambda: ops.allreduce_async(two.t()),
        lambda: ops.allreduce_async(one, op=17),
        lambda: ops.allreduce_async(one, op=Sum, average=True),
        lambda: ops.broadcast_async(one, 2),
        lambda: ops.alltoall_async(torch.ones(3)),
        lambda: ops.alltoall_async(two, [1]),
        lambda: ops.alltoall_async(two, [4, 1]),
        lambda: ops.alltoall_async(two, [-1, 2]),
        lambda: ops.alltoall_async(two, torch.tensor([2, 2])),
        lambda: ops.reducescatter_async(two, op=Max),
        lambda: ops.allreduce_async(one, process_set=ProcessSet([0])),
        lambda: poll(10_000),
    ]
    found = [refused(call) for call in wrong]
    assert synchronize(10_000) is None
    return found, total()


# Numbers.


@in_a_job
def average_whole_numbers() -> dict[str, Any]:
    rank = basics.rank()
    given = torch.tensor([7, -7, 1, -1, 0]) + rank  # sums over 2 ranks: 15, -13, 3, -1, 1
    found: dict[str, Any] = {}
    for name in ("int8", "int32", "int64"):
        reduced = synchronize(ops.allreduce_async(given.to(getattr(torch, name)), name=name))
        assert reduced.dtype == getattr(torch, name)
        found[name] = reduced.tolist()
    found["prescale"] = synchronize(ops.allreduce_async(given, op=Sum, prescale_factor=0.5)).tolist()
    found["postscale"] = synchronize(ops.allreduce_async(given, op=Sum, postscale_factor=0.5)).tolist()
    large = torch.tensor([(1 << 52) + 1])
    found["large"] = synchronize(ops.allreduce_async(large)).tolist()
    return found


@in_a_job
def reduce_all_ways() -> dict[str, Any]:
    """Reductions of every type, out of place with the input as it was, and in place."""
    rank, found = basics.rank(), {}
    for name in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        dtype = getattr(torch, name)
        given = torch.tensor([2, 3, 5], dtype=dtype) + rank
        for op in (Average, Sum, Min, Max, Product):
            before = given.clone()
            reduced = synchronize(ops.allreduce_async(given, op=op))
            assert torch.equal(given, before) and reduced.dtype == dtype and reduced.data_ptr() != given.data_ptr()
            again = synchronize(ops.allreduce_async_(before, op=op))
            assert again is before and torch.equal(again, reduced)
            found[name, op] = reduced.tolist()
    half = torch.tensor([1000.0, 3.0], dtype=torch.float16)
    found["scaled"] = synchronize(
        ops.allreduce_async(half, op=Sum, prescale_factor=0.25, postscale_factor=4.0)
    ).tolist()
    found["empty"] = synchronize(ops.allreduce_async(torch.empty(0, 3))).shape
    found["scalar"] = synchronize(ops.allreduce_async(torch.tensor(2.0), op=Sum)).item()
    leaf = torch.ones(2, requires_grad=True)
    found["leaf"] = synchronize(ops.allreduce_async_(leaf, op=Sum)).tolist()
    return found


@in_a_job
def reduce_groups() -> tuple[list[Any], bool, list[Any]]:
    """A group with several types of numbers, and one of which rank 0 is the only one to have submitted a part."""
    rank = basics.rank()
    group = [torch.full((2,), 1e8 + rank, dtype=torch.float64), torch.full((3,), float(rank)), torch.tensor([rank])]
    out = synchronize(ops.grouped_allreduce_async(group, name="mixed", op=Sum))
    inside = [torch.full((2,), float(rank)) for _ in range(3)]
    if rank == 1:
        after_all_came("the poll")
    handle = ops.grouped_allreduce_async_(inside, name="g", op=Sum)
    early = poll(handle) if rank == 0 else False
    if rank == 0:
        after_all_came("the poll")
    same = synchronize(handle)
    assert all(one is other for one, other in zip(same, inside, strict=True))
    assert synchronize(ops.grouped_allreduce_async([])) == ()
    return [each.tolist() for each in out], early, [each.tolist() for each in same]


@in_a_job
def gather_rows() -> dict[str, Any]:
    rank, size, found = basics.rank(), basics.size(), {}
    for name in DTYPES:
        mine = torch.full((rank, 2), rank % 2).to(getattr(torch, name))  # none on rank 0
        whole = synchronize(ops.allgather_async(mine))
        assert whole.dtype == mine.dtype
        found[name] = whole.tolist()
    found["none"] = synchronize(ops.allgather_async(torch.empty(0, 5))).shape
    found["thin"] = synchronize(ops.allgather_async(torch.empty(rank, 0))).shape
    found["all but one"] = synchronize(ops.allgather_async(torch.full((3 * (rank == size - 1),), rank))).tolist()
    return found


@in_a_job
def broadcast_all() -> dict[Any, Any]:
    rank, found = basics.rank(), {}
    for root in range(basics.size()):
        for name in DTYPES:
            mine = (torch.arange(4) * (rank + 1) % 3).to(getattr(torch, name))
            before = mine.clone()
            found[root, name] = synchronize(ops.broadcast_async(mine, root)).tolist()
            assert torch.equal(mine, before)
            assert synchronize(ops.broadcast_async_(mine, root)) is mine
            assert mine.tolist() == found[root, name]
    found["scalar"] = synchronize(ops.broadcast_async(torch.tensor(rank + 5), 1)).item()
    found["empty"] = synchronize(ops.broadcast_async(torch.empty(0), 1)).shape
    return found


@in_a_job
def swap_rows() -> dict[str, Any]:
    """Row i of rank r is 10 r + i."""
    rank, size = basics.rank(), basics.size()
    rows = torch.arange(2 * size, dtype=torch.int16).add(10 * rank).view(-1, 1).repeat(1, 2)
    even, counts = synchronize(ops.alltoall_async(rows))
    found = {"even": even[:, 0].tolist(), "even counts": counts.tolist()}
    for name, splits in {"list": [rank] * size, "tensor": torch.tensor([rank] * size, dtype=torch.int32)}.items():
        mine, counts = synchronize(ops.alltoall_async(rows, splits))
        assert mine.dtype == rows.dtype and mine.shape[1:] == (2,) and counts.dtype == torch.int32
        found[name] = mine[:, 1].tolist(), counts.tolist()
    nothing, counts = synchronize(ops.alltoall_async(rows, [0] * size))
    found["nothing"] = tuple(nothing.shape), counts.tolist()
    return found


@in_a_job
def scatter_rows() -> dict[str, Any]:
    rank = basics.rank()
    given = torch.arange(14, dtype=torch.float64).view(7, 2) + rank
    before = given.clone()
    found = {
        "sum": synchronize(ops.reducescatter_async(given, op=Sum)).tolist(),
        "mean": synchronize(ops.reducescatter_async(given)).tolist(),
        "scaled": synchronize(ops.reducescatter_async(given, prescale_factor=2.0, postscale_factor=0.25)).tolist(),
        "few": tuple(synchronize(ops.reducescatter_async(given[:1])).shape),
        "none": tuple(synchronize(ops.reducescatter_async(given[:0])).shape),
    }
    assert torch.equal(given, before)
    return found


def work_alone() -> dict[str, Any]:
    """Every collective in a job of one rank."""
    basics.init()
    x = torch.tensor([[3, 4]])
    rows, counts = synchronize(ops.alltoall_async(x))
    found = {
        "allreduce": synchronize(ops.allreduce_async(x)).tolist(),
        "allgather": synchronize(ops.allgather_async(x)).tolist(),
        "broadcast": synchronize(ops.broadcast_async(x, 0)).tolist(),
        "alltoall": (rows.tolist(), counts.tolist()),
        "reducescatter": synchronize(ops.reducescatter_async(x)).tolist(),
        "error": waits(ops.allgather_async(torch.tensor(1.0))),
        "join": ops.join(),
    }
    ops.barrier()
    basics.shutdown()
    return found


# Time: who waits for whom.


@in_a_job
def poll_while_a_rank_is_away() -> tuple[bool, bool, float]:
    """Rank 0 sees its operation open until rank 1 submits, and done afterwards without having waited for it."""
    if basics.rank() == 1:
        after_all_came("the first poll")
        return False, False, total(name="x")
    handle = ops.allreduce_async(torch.ones(1), name="x", op=Sum)
    early = any(poll(handle) for _ in range(100))
    after_all_came("the first poll")
    while not poll(handle):
        time.sleep(0.001)
    return early, poll(handle), synchronize(handle).item()


@in_a_job
def wait_at_barriers() -> bool:
    """Nobody passes a barrier before the last rank has come to it."""
    store = basics._group.store  # pyright: ignore[reportOptionalMemberAccess]
    right = True
    for turn in range(5):
        if basics.rank() == turn % basics.size():
            time.sleep(0.02)
        store.add(f"came/{turn}", 1)
        ops.barrier()
        right = right and store.add(f"came/{turn}", 0) == basics.size()
    return right


@in_a_job
def join_unevenly() -> dict[str, Any]:
    """Rank r has r + 1 batches; the last rank also tries what is not possible while others have joined."""
    rank, size = basics.rank(), basics.size()
    means = []
    for batch in range(rank + 1):
        pair = [torch.full((2,), 12.0), torch.full((3,), 24.0)]
        means.append([ops.synchronize(ops.allreduce_async(each, name=f"{batch}{len(each)}")) for each in pair])
    found: dict[str, Any] = {"means": [[each[0].item() for each in pair] for pair in means]}
    if rank == size - 1:
        one = torch.ones(size)
        found["refused"] = [
            waits(ops.allgather_async(one, "a")),
            waits(ops.broadcast_async(one, 0, "b")),
            waits(ops.alltoall_async(one, name="c")),
            waits(ops.reducescatter_async(one, "d")),
        ]
        found["whole numbers"] = synchronize(ops.allreduce_async(torch.tensor([-7]))).item()
        found["group"] = [t.item() for t in synchronize(ops.grouped_allreduce_async([one[:1], one[:1]], op=Sum))]
    found["last"] = ops.join()
    found["after"] = total(), synchronize(ops.allgather_async(torch.tensor([rank]))).tolist()
    after_all_came("the second join")
    if rank == 0:
        time.sleep(0.2)  # the last one to come
    found["second"] = ops.join()
    return found


# Process sets.


def work_in_sets() -> dict[str, Any]:
    even, odd, first = ProcessSet([2, 0]), ProcessSet([1, 3]), ProcessSet(range(3))
    basics.init(process_sets=[even, odd, first])
    rank = basics.rank()
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
    found: dict[str, Any] = {
        "repr": [repr(each) for each in (even, odd, first)],
        "places": (mine.rank(), mine.size(), mine.included(), other.included()),
        "not mine": refused(lambda: ops.allreduce_async(torch.ones(1), process_set=other)),
        "no rank": refused(other.rank),
        "wrong root": refused(lambda: ops.broadcast_async(torch.ones(1), 1 - rank % 2, process_set=mine)),
    }
    if rank == 3:
        found["barrier"] = refused(lambda: ops.barrier(first))
    value = torch.tensor([rank + 1.0])
    handles = [ops.allreduce_async(value, name="x", op=Average), ops.allreduce_async(value, name="x", process_set=mine)]
    if rank < 3:
        handles.append(ops.allreduce_async(value, name="x", op=Sum, process_set=first))
    order = handles if rank % 2 else handles[::-1]
    taken = {handle: synchronize(handle).item() for handle in order}
    found["reduced"] = [taken[handle] for handle in handles]
    found["gathered"] = synchronize(ops.allgather_async(value, process_set=mine)).tolist()
    found["root"] = synchronize(ops.broadcast_async(value, mine.ranks[1], process_set=mine)).item()  # pyright: ignore
    rows, counts = synchronize(ops.alltoall_async(torch.arange(2) + 10 * rank, process_set=mine))
    found["swapped"] = rows.tolist(), counts.tolist()
    found["scattered"] = synchronize(ops.reducescatter_async(torch.arange(2.0), op=Sum, process_set=mine)).tolist()
    if rank < 3:
        ops.barrier(first)
    found["unnamed"] = total()  # rank 3 has had fewer operations without a name
    ops.barrier()
    basics.shutdown()
    found["after"] = refused(mine.size), mine.process_set_id
    return found


def give_wrong_sets() -> list[Any]:
    found = []
    for sets in ([ProcessSet([0]), ProcessSet([0])], [ProcessSet([0, 1])], [ProcessSet([2])]):
        found.append(refused(lambda sets=sets: basics.init(process_sets=sets)))
        assert not basics.is_initialized()
        basics.init()
        found.append(total())
        ops.barrier()
        basics.shutdown()
    return found


# Beginnings and ends.


def start_again(rounds: int) -> tuple[list[float], list[str], tuple[str, str], tuple[str, str]]:
    sums = []
    for turn in range(rounds):
        half = ProcessSet([turn % 2])
        basics.init(process_sets=[half])
        basics.init()  # does nothing
        if basics.rank() == turn % 2:
            ops.synchronize(ops.allreduce_async(torch.ones(1), process_set=half))
        sums.append(total(turn))
        ops.barrier()
        basics.shutdown()
        basics.shutdown()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("hvd")]
    return sums, left, refused(basics.rank), refused(lambda: ops.allreduce_async(torch.ones(1)))


def start_again_late() -> float:
    """Rank 1 comes back after rank 0 would have taken it for dead."""
    engine.HEARTBEAT_SECONDS, engine.SILENCE_SECONDS = 0.2, 4.0
    basics.init()
    ops.barrier()
    basics.shutdown()
    if os.environ["RANK"] == "1":
        time.sleep(5.0)
    basics.init()
    answer = total()
    ops.barrier()
    basics.shutdown()
    return answer


def shut_down_while_others_wait(leaver: int) -> tuple[tuple[str, str], tuple[str, str], float]:
    """One rank shuts down while the others wait for it; then all start again."""
    basics.init()
    if basics.rank() == leaver:
        after_all_came("the shutdown")
        basics.shutdown()
        errors = ("", ""), ("", "")
    else:
        handle = ops.allreduce_async(torch.ones(1), name="x")
        after_all_came("the shutdown")
        errors = waits(handle), refused(lambda: ops.allreduce_async(torch.ones(1)))
        basics.shutdown()
    basics.init()
    answer = total()
    ops.barrier()
    basics.shutdown()
    return *errors, answer


def leave_at_once(last: str) -> Any:
    """End the process right after an operation that rank 0 can be through with before the others have heard of it."""
    if os.environ["RANK"] != "0":
        wait = HubChannel.responses
        HubChannel.responses = lambda self, seconds: (time.sleep(0.3), wait(self, seconds))[1]  # slow to hear
    basics.init()
    if last == "barrier":
        ops.barrier()
        answer: Any = "through"
    elif last == "join":
        answer = ops.join() >= 0
    else:
        answer = synchronize(ops.broadcast_async(torch.tensor([basics.rank()]), 0)).item()
    basics.shutdown()
    return answer


def lose_a_rank(victim: int, how: str, inside: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """A rank ends without a word while others wait for it, or in the middle of what it does with them."""
    engine.HEARTBEAT_SECONDS, engine.SILENCE_SECONDS, engine.LEAVE_SECONDS = 0.2, 4.0, 0.5
    basics.init()
    total()
    store = basics._group.store  # pyright: ignore[reportOptionalMemberAccess]
    if basics.rank() == victim:
        if inside:
            engine.execute = lambda *_: die(how)
            ops.allreduce_async(torch.ones(1 << 20), name="x")
        while inside or store.add("waiting", 0) < basics.size() - 1:
            time.sleep(0.01)
        die(how)
    handle = ops.allreduce_async(torch.ones(1 << 20), name="x")
    store.add("waiting", 1)
    answer = waits(handle), refused(lambda: total())
    if victim != 0:  # nobody is told by the end of another's process
        with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, ends when all have been told
            store.add("told", 1)
            while store.add("told", 0) < basics.size() - 1:
                time.sleep(0.01)
    basics.shutdown()
    if inside:
        assert refused(basics.init)[0] == "HorovodInternalError"
    return answer


def die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def stall(shutdown_seconds: str) -> tuple[list[str], Any]:
    """Rank 1 comes to an operation only after the warning, or after rank 0 has given up."""
    os.environ |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": shutdown_seconds}
    engine.HEARTBEAT_SECONDS = 0.1
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    engine.log.addHandler(handler)
    basics.init()
    if basics.rank() == 1:
        after_all_came("the end of the stall")
        if shutdown_seconds == "0":
            answer: Any = total(name="slow")
        else:
            answer = refused(lambda: total(name="slow"))
    else:
        handle = ops.allreduce_async(torch.ones(1), name="slow", op=Sum)
        while not (lines if shutdown_seconds == "0" else poll(handle)) and basics.rank() == 0:
            time.sleep(0.01)
        after_all_came("the end of the stall")
        answer = synchronize(handle).item() if shutdown_seconds == "0" else waits(handle)
    if shutdown_seconds == "0":
        ops.barrier()
    basics.shutdown()
    return lines, answer


def watch_messages() -> dict[str, Any]:
    """What is said over three rounds of the same names, the last of which changes a shape."""
    said: list[Message] = []
    send = HubChannel.send

    def noted(self: HubChannel, message: Message) -> None:
        if message.requests or message.known:
            said.append(message)
        send(self, message)

    HubChannel.send = noted
    basics.init()
    rounds: dict[str, Any] = {}
    for turn in ("first", "second", "changed"):
        said.clear()
        results = []
        for i in range(4):
            rows = 5 if turn == "changed" and i == 2 else 2
            results.append(synchronize(ops.allreduce_async(torch.ones(rows), name=f"x{i}", op=Sum)).tolist())
        rounds[turn] = sum(len(m.requests) for m in said), sum(len(m.known) for m in said), results
        ops.synchronize(ops.allreduce_async(torch.ones(1)))
    rounds["numbers"] = len(basics.engine()._numbers)
    shape = 2 if basics.rank() else 5  # both are known
    rounds["mismatch"] = waits(ops.allreduce_async(torch.ones(shape), name="x2", op=Sum))
    ops.barrier()
    basics.shutdown()
    return rounds
