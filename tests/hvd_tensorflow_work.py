"""What ranks do in the tests of TensorFlow's part; each function runs on every rank."""

import inspect
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from hvd_jobs import in_a_job, refused

import tutti.horovod.tensorflow as hvd
from tutti.horovod import basics, engine
from tutti.horovod.tensorflow import bridge, elastic
from tutti.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from tutti.horovod.torch import ops

FORMS: dict[str, Callable[[Any], Any]] = {"eager": lambda work: work, "function": tf.function}
REDUCED = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MOVED = (*REDUCED, "int16", "uint16", "bool")


def signatures(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The arguments of functions as the tests write them."""
    return {name: tuple(map(_written, inspect.signature(getattr(hvd, name)).parameters.values())) for name in names}


def _written(parameter: inspect.Parameter) -> str:
    """An argument with its default; a process set is that of all ranks, or has no default."""
    if parameter.default is inspect.Parameter.empty or parameter.default is hvd.global_process_set:
        return parameter.name
    is_none = parameter.default is hvd.Compression.none
    return f"{parameter.name}={'none' if is_none else repr(parameter.default)}"


def leave_the_context_alone() -> tuple[bool, int]:
    """Threads can be set after init: nothing has made TensorFlow choose them."""
    from tensorflow.python.eager import context

    hvd.init()
    untouched = context.context()._context_handle is None
    tf.config.threading.set_intra_op_parallelism_threads(1)
    found = tf.config.threading.get_intra_op_parallelism_threads()
    assert hvd.allreduce(tf.ones(2)).numpy().tolist() == [1, 1]
    ops.barrier()
    hvd.shutdown()
    return untouched, found


@in_a_job
def reduce_all_types(form: str) -> list[str]:
    """Sums and means of every type, alone and in a group with others."""
    rank = hvd.rank()
    mine = [tf.cast(tf.reshape(tf.range(6), [2, 3]) + rank, dtype) for dtype in REDUCED]
    sums = FORMS[form](lambda *given: [hvd.allreduce(each, op=hvd.Sum, name=f"a{i}") for i, each in enumerate(given)])
    grouped = FORMS[form](lambda *given: hvd.grouped_allreduce(list(given), op=hvd.Sum))
    wanted = 2 * np.arange(6).reshape(2, 3) + 1
    wrong = []
    for found in (sums(*mine), grouped(*mine), grouped(*mine)):
        for dtype, each in zip(REDUCED, found, strict=True):
            if each.dtype.name != dtype or not np.array_equal(tf.cast(each, tf.int32), wanted):
                wrong.append(f"{dtype}: {each}")
    mean, most, product = FORMS[form](
        lambda own: (
            hvd.allreduce(own),
            hvd.allreduce(own, op=hvd.Max, name="most"),
            hvd.allreduce(own, op=hvd.Product, prescale_factor=2.0, name="product"),
        )
    )(tf.constant([1.0, 2.0]) * (rank + 1))
    assert mean.numpy().tolist() == [1.5, 3.0] and most.numpy().tolist() == [2.0, 4.0]
    assert product.numpy().tolist() == [8.0, 32.0]
    return wrong


@in_a_job
def move_all_types(form: str) -> list[str]:
    """Rows of all ranks, one rank's rows, and rows for each rank, of every type."""
    rank, wrong = hvd.rank(), []
    for dtype in MOVED:
        rows = tf.cast([[rank, rank + 1]], dtype)
        mine = tf.cast([[rank, rank + 1]] * (rank + 1), dtype)
        whole = tf.cast([[0, 1], [1, 2], [1, 2]], dtype)
        gather, send, exchange = (
            FORMS[form](lambda own: hvd.allgather(own)),
            FORMS[form](lambda own: hvd.broadcast(own, 1)),
            FORMS[form](lambda own: hvd.alltoall(own, [1, 1] if rank else [0, 1])),
        )
        received, counts = exchange(mine)
        for what, found, wanted in (
            ("gathered", gather(mine), whole),
            ("sent", send(rows), tf.cast([[1, 2]], dtype)),
            ("exchanged", received, tf.cast([[1, 2]] if rank == 0 else [[0, 1], [1, 2]], dtype)),
            ("counts", counts, tf.constant([0, 1] if rank == 0 else [1, 1])),
        ):
            if found.dtype != wanted.dtype or not np.array_equal(found.numpy(), wanted.numpy()):
                wrong.append(f"{dtype} {what}: {found}")
    scattered = FORMS[form](lambda own: hvd.reducescatter(own, op=hvd.Sum))(tf.range(3) + rank)
    assert scattered.numpy().tolist() == ([1, 3] if rank == 0 else [5])
    several = FORMS[form](lambda: hvd.grouped_reducescatter([tf.ones([2]), tf.ones([4])], op=hvd.Sum))()
    assert [each.numpy().tolist() for each in several] == [[2], [2, 2]]
    return wrong


@in_a_job
def follow_gradients(form: str) -> dict[str, list[Any]]:
    """Back through every collective, as Horovod defines it."""
    rank = hvd.rank()
    own = tf.Variable(tf.ones([2, 2]))
    weight = float(rank + 1)

    def gradient(through: Callable[[Any], Any]) -> Any:
        def work() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(through(own)) * weight
            return tape.gradient(loss, own)

        return FORMS[form](work)().numpy().tolist()

    return {
        "allreduce": gradient(lambda it: hvd.allreduce(it, op=hvd.Sum)),
        "grouped": gradient(lambda it: hvd.grouped_allreduce([it, it * 2], op=hvd.Average)[1]),
        "allgather": gradient(hvd.allgather),
        "broadcast": gradient(lambda it: hvd.broadcast(it, 1)),
        "alltoall": gradient(lambda it: hvd.alltoall(it, [1, 0])[0]),
        "reducescatter": gradient(lambda it: hvd.reducescatter(it, op=hvd.Sum)),
    }


@in_a_job
def reduce_slices(form: str) -> list[Any]:
    """Rows of a table: gathered, averaged, and refused where that has no meaning."""
    rank = hvd.rank()

    def work(values: Any, indices: Any) -> Any:
        slices = tf.IndexedSlices(values, indices, tf.constant([4, 2]))
        mean, _ = hvd.grouped_allreduce([slices, tf.ones(3)])
        return mean.values, mean.indices, tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum))

    found = FORMS[form](work)(tf.ones([rank + 1, 2]) * (rank + 1), tf.range(rank + 1))
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([4, 2]))
    wrong = refused(lambda: hvd.allreduce(slices, op=hvd.Max))
    return [*(each.numpy().tolist() for each in found), wrong]


@in_a_job
def meet_in_another_order() -> list[Any]:
    """Functions are traced in another order on every rank, and operations in a function stand in another order."""
    rank = hvd.rank()

    @tf.function
    def one(own: Any) -> Any:
        return hvd.allreduce(own, op=hvd.Sum)

    @tf.function
    def other(own: Any) -> Any:
        return hvd.allreduce(own, op=hvd.Max)

    given = tf.constant([1.0 + rank])
    for each in (one, other) if rank == 0 else (other, one):
        each.get_concrete_function(given)

    @tf.function
    def many(own: Any) -> Any:
        numbers = range(8) if rank == 0 else reversed(range(8))
        found = {number: hvd.allreduce(own * number, op=hvd.Sum, name=f"n{number}") for number in numbers}
        return [found[number] for number in range(8)]

    captured = tf.function(lambda: hvd.allreduce(given, op=hvd.Sum))  # a tensor from outside of the graph
    assert captured().numpy()[0] == 3
    return [one(given).numpy()[0], other(given).numpy()[0], [[each.numpy()[0] for each in many(given)] for _ in "ab"]]


@in_a_job
def leave_results_unused() -> list[float]:
    """A graph needs the result only once, and in the end; others are still reduced on all ranks."""

    @tf.function
    def work(own: Any) -> Any:
        hvd.allreduce(own, name="unused")
        return hvd.allreduce(own + 1, name="used")

    return [work(tf.constant(1.0 + hvd.rank() + step)).numpy() for step in range(40)]


@in_a_job
def disagree() -> dict[str, tuple[str, str]]:
    """What differs over ranks is refused on all of them, and the job goes on."""
    rank = hvd.rank()
    found = {
        "shapes": refused(lambda: hvd.allreduce(tf.ones(2 + rank), name="a")),
        "types": refused(lambda: hvd.allreduce(tf.cast(tf.ones(2), tf.int32 if rank else tf.float32), name="b")),
        "root": refused(lambda: hvd.broadcast(tf.ones(2), rank, name="c")),
        "group": refused(lambda: hvd.grouped_allreduce([tf.ones(2), tf.ones([2 + rank, 3])], name="d")),
        "function": refused(lambda: tf.function(hvd.allreduce)(tf.ones(2 + rank))),
        "splits": refused(lambda: hvd.alltoall(tf.ones(2), [1, 2])),
        "op": refused(lambda: hvd.allreduce(tf.ones(2), op=9)),
        "type": refused(lambda: hvd.allreduce(tf.constant([True]))),
        "no rows": refused(lambda: hvd.allgather(tf.constant(1.0))),
    }
    assert hvd.allreduce(tf.ones(2), name="a").numpy().tolist() == [1, 1]
    return found


def lose_a_rank(form: str) -> str:
    """The last rank dies before its operation."""
    engine.HEARTBEAT_SECONDS, engine.SILENCE_SECONDS = 0.5, 5.0
    hvd.init()
    store = basics._group.store  # pyright: ignore[reportOptionalMemberAccess]
    work = FORMS[form](lambda own: hvd.allreduce(own, name="a"))
    work(tf.ones(2))
    if hvd.rank() == hvd.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, text = refused(lambda: work(tf.ones(2)))
    end_after(store, hvd.size() - 1)
    return f"{kind}: {text}"


def end_after(store: Any, count: int) -> None:
    """Shut down when so many ranks have their error: nobody is told by the end of another's process."""
    store.add("told", 1)
    while store.add("told", 0) < count:
        time.sleep(0.01)
    if hvd.rank():
        store.add("left", 1)
    while hvd.rank() == 0 and store.add("left", 0) < count - 1:  # its process holds the store
        time.sleep(0.01)
    hvd.shutdown()


def fail_a_copy() -> tuple[str, str]:
    """The last rank cannot copy its tensor into the message that the other rank waits for."""
    engine.HEARTBEAT_SECONDS = 0.5
    hvd.init()
    store = basics._group.store  # pyright: ignore[reportOptionalMemberAccess]
    hvd.allreduce(tf.ones(2), name="a", op=hvd.Sum)
    if hvd.rank() == hvd.size() - 1:

        def fail(*_: Any) -> None:
            raise MemoryError("by plan")

        torch._foreach_copy_ = fail
    found = refused(lambda: hvd.allreduce(tf.ones(2), name="a", op=hvd.Sum))
    end_after(store, hvd.size())
    return found


@in_a_job
def use_a_tape(form: str) -> list[Any]:
    """Gradients of a step in one call: dense, sparse, missing, this rank's own, and in half precision."""
    rank = hvd.rank()
    weight, table, unused = tf.Variable(tf.ones([2])), tf.Variable(tf.ones([3, 2])), tf.Variable(1.0)

    def step(tape: Any, wrap: dict[str, Any]) -> Any:
        with tape:
            rows = tf.gather(table, [rank])
            loss = tf.reduce_sum(weight) * (rank + 1) + tf.reduce_sum(rows)
        return hvd.DistributedGradientTape(tape, **wrap).gradient(loss, [weight, table, unused])

    found = []
    submitted = []
    submit = basics.engine().submit
    basics.engine().submit = lambda *given: (submitted.append(len(given)), submit(*given))[1]
    for wrap in ({}, {"sparse_as_dense": True}, {"compression": hvd.Compression.fp16, "op": hvd.Sum}):
        once = FORMS[form](lambda wrap=wrap: step(tf.GradientTape(), wrap))
        for _ in range(2):
            dense, sparse, none = once()
        found.append([dense.numpy().tolist(), tf.convert_to_tensor(sparse).numpy().tolist(), none])
    tape = tf.GradientTape()
    with tape:
        loss = tf.reduce_sum(weight) * (rank + 1)
    partly = hvd.DistributedGradientTape(tape)
    partly.register_local_source(weight)
    local, shared = partly.get_local_and_global_gradients(loss, [weight])
    assert local[0][0] is weight and not shared
    found.append(local[0][1].numpy().tolist())
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(weight) * (rank + 1)
    return [*found, tape.gradient(loss, weight).numpy().tolist(), isinstance(tape, tf.GradientTape)]


@in_a_job
def count_calls() -> tuple[int, int]:
    """A step with 20 gradients in a function: calls out of the graph, and messages of the engine."""
    weights = [tf.Variable(tf.ones([3, place + 1])) for place in range(20)]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(weight * weight) for weight in weights])
        return hvd.DistributedGradientTape(tape).gradient(loss, weights)

    step()
    graph = step.get_concrete_function().graph
    calls = [each for each in graph.get_operations() if each.type.startswith("PyFunc")]
    return len(calls), sum(each.numpy().sum() == 6 * (place + 1) for place, each in enumerate(step()))


@in_a_job
def broadcast_in_many_places() -> list[Any]:
    """Variables of TensorFlow and of Keras, at once and in the first step of a function."""
    rank = hvd.rank()
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(2), tf.keras.layers.BatchNormalization()])
    own = [tf.Variable(tf.ones([2]) * rank), tf.Variable(rank), tf.Variable(rank == 1)]

    @tf.function
    def first_step(begins: bool) -> None:
        for variable in own[:2]:
            variable.assign_add(tf.ones_like(variable))
        if begins:
            hvd.broadcast_variables(own, root_rank=1)
            hvd.broadcast_variables(model.variables, root_rank=1)

    before = [weight.sum().item() for weight in model.get_weights()]
    first_step(True)
    first_step(False)
    after = [weight.tolist() for weight in model.get_weights()]
    hvd.broadcast_variables([], root_rank=0)
    values = hvd.broadcast_(own[:1], root_rank=0)
    wrong = refused(lambda: hvd.broadcast_global_variables(0))
    return [before, after, [variable.numpy().tolist() for variable in own], values[0].numpy().tolist(), wrong]


@in_a_job
def use_objects_and_sets() -> list[Any]:
    """Plain objects, what a graph asks when it runs, ranks that have joined, and half of the ranks."""
    rank = hvd.rank()
    found: list[Any] = [
        hvd.broadcast_object({"rank": rank}, 1),
        hvd.allgather_object(rank),
        hvd.broadcast_object_fn(0)([rank]),
        [each.numpy() for each in tf.function(lambda: [hvd.size_op(), hvd.rank_op(), hvd.local_size_op()])()],
    ]
    if rank == 0:
        found.append(hvd.allreduce(tf.ones(2), name="last").numpy().tolist())
    found.append(hvd.join().numpy())
    return found


def use_a_process_set() -> list[Any]:
    """One rank's own set: it works there alone, and the other is refused."""
    mine = hvd.ProcessSet([0])
    hvd.init(process_sets=[mine])
    found = [hvd.process_set_included_op(1).numpy(), hvd.process_set_included_op(7).numpy()]
    if hvd.rank() == 0:
        found.append(hvd.allreduce(tf.ones(2), process_set=mine).numpy().tolist())
    else:
        found.append(refused(lambda: hvd.allreduce(tf.ones(2), process_set=mine))[0])
    with tf.GradientTape() as tape:
        weight = tf.Variable(1.0 + hvd.rank())
        loss = weight * weight
    found.append(hvd.DistributedGradientTape(tape, process_set=mine).gradient(loss, weight).numpy())
    ops.barrier()
    hvd.shutdown()
    return found


@in_a_job
def normalise_together() -> float:
    """The largest difference to a layer that has seen both ranks' batches, of outputs, statistics and gradients."""
    both = tf.random.stateless_normal([8, 4, 3], [1, 2]) * 3 + 1
    mine = both[4 * hvd.rank() : 4 * (hvd.rank() + 1)]
    together, alone = SyncBatchNormalization(name="norm"), tf.keras.layers.BatchNormalization()
    with tf.GradientTape() as tape:
        tape.watch(mine)
        own = together(mine, training=True)
        loss = tf.reduce_sum(tf.sin(own))
    with tf.GradientTape() as whole_tape:
        whole_tape.watch(both)
        whole = alone(both, training=True)
        whole_loss = tf.reduce_sum(tf.sin(whole))
    part = slice(4 * hvd.rank(), 4 * (hvd.rank() + 1))
    pairs = [
        (own, whole[part]),
        (together.moving_mean, alone.moving_mean),
        (together.moving_variance, alone.moving_variance),
        (tape.gradient(loss, mine), whole_tape.gradient(whole_loss, both)[part]),
    ]
    return max(float(np.abs(np.asarray(one) - np.asarray(other)).max()) for one, other in pairs)


@in_a_job
def keep_a_state() -> list[Any]:
    """Variables, a model with its optimizer, and plain values: saved, restored, and taken over from rank 0."""
    rank = hvd.rank()
    weight = tf.Variable([1.0 * rank])
    state = elastic.TensorFlowState([weight], epoch=rank)
    state.sync()
    found = [weight.numpy().tolist(), state.epoch]
    weight.assign([5.0])
    state.epoch = 5
    state.restore()
    found += [weight.numpy().tolist(), state.epoch]
    weight.assign([7.0])
    state.save()
    weight.assign([8.0])
    state.restore()
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = tf.keras.optimizers.Adam(0.1 * (rank + 1))
    optimizer.build(model.trainable_variables)
    of_model = elastic.TensorFlowKerasState(model, optimizer, batch=rank)
    model.set_weights([each + rank for each in model.get_weights()])
    of_model.sync()
    unbuilt = refused(lambda: elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)])))
    rate = float(optimizer.learning_rate.numpy())
    return [*found, weight.numpy().tolist(), model.get_weights()[0].tolist(), rate, of_model.batch, unbuilt[0]]


@in_a_job
def fail_and_go_on() -> list[Any]:
    """A mismatch in a function of an elastic job: state is restored, and the function is called again."""
    tries = []
    weight = tf.Variable(1.0)

    @elastic.run
    def train(state: Any) -> float:
        tries.append(state.epoch)
        weight.assign_add(1.0)
        if len(tries) == 1:
            state.epoch = 9
            tf.function(hvd.allreduce)(tf.ones(1 + hvd.rank()))
        return float(weight.numpy())

    return [train(elastic.TensorFlowState([weight], epoch=3)), tries]


@in_a_job
def reuse_memory() -> tuple[int, bool]:
    """Results of many steps lie in few pieces of memory, and none is taken while somebody has it."""
    tensors = [tf.ones([300_000]) * (place + 1) for place in range(4)]
    work = tf.function(lambda given: hvd.grouped_allreduce(given, op=hvd.Sum))
    held = [work([tensor * (step + 1) for tensor in tensors]) for step in range(3)]
    for _ in range(20):
        work(tensors)
    right = all(
        np.all(each.numpy() == 2 * (place + 1) * (step + 1))
        for step, found in enumerate(held)
        for place, each in enumerate(found)
    )
    return len(bridge._free), right
