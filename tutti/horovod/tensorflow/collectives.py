"""Differentiable collectives on tensors of TensorFlow, by Horovod's names: eager and in graphs."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import tensorflow as tf
import torch

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.engine.execute import is_power_of_two
from tutti.horovod.engine.messages import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM
from tutti.horovod.gradients import Compression
from tutti.horovod.tensorflow.bridge import Submitted, not_converted, packed, run_operation
from tutti.horovod.torch import ops
from tutti.horovod.torch.arguments import reduce_op

# fmt: off
__all__ = [  # in the namespace horovod.tensorflow
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather", "allreduce", "alltoall", "broadcast",
    "broadcast_", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "reducescatter",
]
# fmt: on

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

_DIVIDED = (torch.float32, torch.float64)
_basics = basics  # some programs for Horovod use it


@not_converted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor, or tf.IndexedSlices, over ranks; the gradient is reduced the same way."""
    op, scales = reduce_op(op, average), (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        return _reduce_slices([tensor], op, scales, name, process_set, ignore_name_scope)[0]
    options = {"name": name, "ignore_name_scope": ignore_name_scope}
    return _reduce_dense([tensor], compression, op, scales, process_set, options)[0]


@not_converted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors as one unit; tf.IndexedSlices among them are gathered as another."""
    op = reduce_op(op, average)
    scales = prescale_factor, postscale_factor
    is_sparse = [isinstance(tensor, tf.IndexedSlices) for tensor in tensors]
    dense = [tensor for tensor, sparse in zip(tensors, is_sparse, strict=True) if not sparse]
    slices = [tensor for tensor, sparse in zip(tensors, is_sparse, strict=True) if sparse]
    options = {"name": name, "ignore_name_scope": ignore_name_scope}
    if slices:
        _check_slices(op, scales)  # before anything is submitted
    reduced = iter(_reduce_dense(dense, compression, op, scales, process_set, options))
    added = iter(_reduce_slices(slices, op, scales, name, process_set, ignore_name_scope))
    return [next(added if sparse else reduced) for sparse in is_sparse]


@not_converted
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the rows of all ranks; a rank's gradient is the mean over ranks for its rows."""
    return _gather([tensor], name, ignore_name_scope, process_set, grouped=False)[0]


@not_converted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Concatenate the rows of all ranks for several tensors, as one unit."""
    return _gather(list(tensors), name, ignore_name_scope, process_set, grouped=True)


@not_converted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcast a rank's tensor to all ranks."""

    @tf.custom_gradient
    def send(own: Any) -> Any:
        def backward(grad: Any) -> Any:
            mean = allreduce(grad, op=Average, process_set=process_set)
            if basics.rank() == root_rank:
                return mean
            with tf.control_dependencies([mean]):  # otherwise the graph would omit it here, and the root would wait
                return tf.zeros_like(grad)

        return broadcast_all([own], root_rank, name, process_set, ignore_name_scope)[0], backward

    return send(tf.convert_to_tensor(tensor))


@not_converted
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Broadcast a rank's variables to all ranks, in place; return their values."""
    values = broadcast_all([tf.convert_to_tensor(variable) for variable in variables], root_rank, name, process_set)
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return values if tf.executing_eagerly() else [tf.convert_to_tensor(each) for each in assigned]


def broadcast_all(
    tensors: Sequence[Any],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Broadcast a rank's tensors to all ranks in one operation, without gradients."""
    start = ops.grouped_broadcast_async if len(tensors) > 1 else _first_of(ops.broadcast_async)

    def submit(own_name: str | None, given: list[Any]) -> Submitted:
        return Submitted([start(given, root_rank, own_name, process_set)])

    if not tensors:
        return []
    outputs = [(tensor.dtype, tensor.shape) for tensor in tensors]
    return run_operation("HorovodBroadcast", submit, tensors, outputs, name, ignore_name_scope)


@not_converted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank; return the received rows, and with splits also how many came from each rank."""

    def submit(own_name: str | None, given: list[Any]) -> Submitted:
        splits = given[1] if len(given) > 1 else None
        return Submitted([ops.alltoall_async(given[0], splits, own_name, process_set)])

    @tf.custom_gradient
    def exchange(own: Any, *rows: Any) -> Any:
        outputs = [(own.dtype, _any_rows(own.shape)), (tf.int32, [None])]
        received, counts = run_operation("HorovodAlltoall", submit, [own, *rows], outputs, name, ignore_name_scope)

        def backward(grad: Any, _: Any) -> Any:
            back, _ = alltoall(grad, counts, process_set=process_set)
            unsent = tf.shape(own)[0] - tf.shape(back)[0]  # rows that were not sent have no gradient
            padding = tf.concat([[[0, unsent]], tf.zeros([tf.rank(own) - 1, 2], tf.int32)], 0)
            return (tf.pad(back, padding), *(None for _ in rows))

        return (received, counts), backward

    if splits is None:
        return exchange(tf.convert_to_tensor(tensor))[0]
    return exchange(tf.convert_to_tensor(tensor), tf.convert_to_tensor(splits, dtype_hint=tf.int32))


@not_converted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce over ranks, and return this rank's rows."""
    scales = prescale_factor, postscale_factor
    options = {"name": name, "ignore_name_scope": ignore_name_scope}
    return _scatter([tensor], compression, op, scales, process_set, False, options)[0]


@not_converted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce several tensors as one unit, and return this rank's rows of each."""
    return _scatter(tensors, compression, op, (prescale_factor, postscale_factor), process_set, True, {"name": None})


def _reduce_dense(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    options: dict[str, Any],
) -> list[Any]:
    if not tensors:
        return []
    if process_set.process_set_id not in basics.engine().sets:
        raise ValueError(f"{process_set} is not registered, or has been removed.")

    def submit(name: str | None, given: list[Any]) -> Submitted:
        if op == Adasum:
            handle = ops.grouped_allreduce_async(given, None, name, op, *scales, process_set)
            return Submitted([handle])
        return _submit_packed(given, name, op, scales, process_set)

    def reduce(*given: Any, name: str | None = None, ignore_name_scope: bool = False) -> list[Any]:
        @tf.custom_gradient
        def through(*own: Any) -> Any:
            outputs = [(tensor.dtype, tensor.shape) for tensor in own]
            reduced = run_operation("HorovodAllreduce", submit, own, outputs, name, ignore_name_scope)
            return reduced, lambda *grads: reduce(*grads)

        return list(through(*given))

    compressed, contexts = _compressed(tensors, compression)
    return _decompressed(reduce(*compressed, **options), contexts, compression)


def _submit_packed(
    tensors: list[Any], name: str | None, op: int, scales: tuple[float, float], process_set: ProcessSet
) -> Submitted:
    """Submit tensors packed in one message for each dtype, or in several where one would be too large."""
    handles, results, size = [], list(tensors), len(basics.engine().sets[process_set.process_set_id or 0].ranks)
    messages = _messages([(tensor.dtype, tensor.nbytes) for tensor in tensors], basics.engine().fusion_bytes)
    for number, places in enumerate(messages):
        own = [tensors[place] for place in places]
        whole, parts = packed(own)
        for place, part in zip(places, parts, strict=True):
            results[place] = part
        own_name = f"{name}.{number}" if name and number else name
        filled: Future[None] = Future()
        sent, shapes = (whole, [tensor.shape for tensor in own]) if len(own) > 1 else (parts[0], [])
        # The number of ranks is a power of two: dividing before the sum gives the same result as dividing after it.
        divided = op == Average and len(own) > 1 and is_power_of_two(size) and own[0].dtype in _DIVIDED
        handles.append(ops.packed_allreduce_async(sent, shapes, own_name, op, scales, process_set, filled, divided))
        try:  # while the ranks agree on the operation
            _fill(parts, own, 1 / size if divided else 1.0)
        except BaseException as error:  # the operation must fail on all ranks: they would wait for ever
            filled.set_exception(RuntimeError(f"the tensors of this rank could not be copied: {error!r}"))
            raise
        filled.set_result(None)
    return Submitted(handles, results)


def _fill(parts: list[torch.Tensor], tensors: list[torch.Tensor], factor: float) -> None:
    """Copy tensors into the parts of a buffer, multiplied by a factor."""
    if factor == 1.0:
        torch._foreach_copy_(parts, tensors)
        return
    for tensor, part in zip(tensors, parts, strict=True):
        torch.mul(tensor, factor, out=part)


def _messages(sizes: Sequence[tuple[Any, int]], most_bytes: int) -> list[list[int]]:
    """Return the indices of the tensors of each message: of one dtype, in order, as many as fit."""
    messages: dict[Any, list[list[int]]] = {}
    filled: dict[Any, int] = {}
    for place, (dtype, size) in enumerate(sizes):
        if dtype not in messages or filled[dtype] + size > most_bytes:
            messages.setdefault(dtype, []).append([])
            filled[dtype] = 0
        messages[dtype][-1].append(place)
        filled[dtype] += size
    return [message for of_type in messages.values() for message in of_type]


def _reduce_slices(
    slices: Sequence[Any],
    op: int,
    scales: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[Any]:
    """Concatenate the slices of all ranks; where they are applied, slices of equal indices are added up."""
    if not slices:
        return []
    _check_slices(op, scales)
    flat = [part for each in slices for part in (each.values, each.indices)]
    gathered = grouped_allgather(flat, f"{name}.slices" if name else None, ignore_name_scope, process_set)
    divisor = process_set.size() if op == Average else 1
    parts = zip(gathered[::2], gathered[1::2], slices, strict=True)
    return [
        tf.IndexedSlices(values / tf.cast(divisor, values.dtype) if divisor > 1 else values, indices, own.dense_shape)
        for values, indices, own in parts
    ]


def _check_slices(op: int, scales: tuple[float, float]) -> None:
    if op not in (Average, Sum) or scales != (1.0, 1.0):
        raise NotImplementedError(
            f"op={op}, prescale and postscale {scales} of tf.IndexedSlices: expected Average or Sum and no scales. "
            "Convert them with tf.convert_to_tensor, or set sparse_as_dense=True."
        )


def _gather(
    tensors: Sequence[Any], name: str | None, ignore_name_scope: bool, process_set: ProcessSet, grouped: bool
) -> list[Any]:
    if not tensors:
        return []
    start = ops.grouped_allgather_async if grouped else _first_of(ops.allgather_async)

    def submit(own_name: str | None, given: list[Any]) -> Submitted:
        return Submitted([start(given, own_name, process_set)])

    @tf.custom_gradient
    def gather(*own: Any) -> Any:
        outputs = [(tensor.dtype, _any_rows(tensor.shape)) for tensor in own]
        gathered = run_operation("HorovodAllgather", submit, own, outputs, name, ignore_name_scope)

        def backward(*grads: Any) -> Any:
            means = grouped_allreduce(grads, op=Average, process_set=process_set)
            counts = tf.stack([tf.shape(tensor)[0] for tensor in own])[tf.newaxis]
            begins = tf.reduce_sum(allgather(counts, process_set=process_set)[: process_set.rank()], 0)
            return [mean[begins[i] : begins[i] + counts[0, i]] for i, mean in enumerate(means)]

        return gathered, backward

    return list(gather(*map(tf.convert_to_tensor, tensors)))


def _scatter(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool,
    options: dict[str, Any],
) -> list[Any]:
    if not tensors:
        return []
    start = ops.grouped_reducescatter_async if grouped else _first_of(ops.reducescatter_async)

    def submit(own_name: str | None, given: list[Any]) -> Submitted:
        return Submitted([start(given, own_name, op, process_set, *scales)])

    @tf.custom_gradient
    def scatter(*own: Any) -> Any:
        outputs = [(tensor.dtype, _any_rows(tensor.shape)) for tensor in own]
        scattered = run_operation("HorovodReducescatter", submit, own, outputs, **options)

        def backward(*grads: Any) -> Any:
            factor = scales[0] * scales[1] * (process_set.size() if op == Sum else 1)
            gathered = grouped_allgather(grads, process_set=process_set)
            return [grad * tf.cast(factor, grad.dtype) if factor != 1 else grad for grad in gathered]

        return scattered, backward

    compressed, contexts = _compressed(tensors, compression)
    return _decompressed(list(scatter(*compressed)), contexts, compression)


def _compressed(tensors: Sequence[Any], compression: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(zip(*(compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors), strict=True))  # pyright: ignore[reportReturnType]


def _decompressed(tensors: Sequence[Any], contexts: Sequence[Any], compression: Any) -> list[Any]:
    return [compression.decompress(tensor, context) for tensor, context in zip(tensors, contexts, strict=True)]


def _first_of(start: Callable[..., int]) -> Callable[..., int]:
    """Make a function of a tensor accept a list of one tensor."""
    return lambda given, *rest: start(given[0], *rest)


def _any_rows(shape: Any) -> Any:
    return shape if shape.rank in (None, 0) else tf.TensorShape([None]).concatenate(shape[1:])
