"""Keras on TensorFlow, and Keras 2: what is done here becomes part of a graph where there is one."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tutti.horovod.basics import ProcessSet
from tutti.horovod.engine.messages import MIN
from tutti.horovod.tensorflow import collectives, training
from tutti.horovod.tensorflow.bridge import as_written
from tutti.horovod.tensorflow.training import Reduction


@as_written
def exchange(distribution: Any, gradients: list[Any], are_local: list[bool]) -> tuple[Any, list[Any]]:
    """Whether a step is due, and its gradients: those of this rank's own variables scaled, all others reduced."""
    if not distribution.accumulates:
        return True, _reduced(distribution, gradients, are_local)
    options = distribution.options
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients) and not options.sparse_as_dense:
        raise ValueError(
            "IndexedSlices with backward_passes_per_step > 1: rows of gradients cannot be added up over passes. "
            "Set sparse_as_dense=True."
        )
    gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    _make_sums(distribution, gradients)
    for total, gradient in zip(distribution.sums, gradients, strict=True):
        total.assign_add(gradient)
    counter = distribution.counter.assign((distribution.counter + 1) % options.backward_passes_per_step)
    due = tf.equal(counter, 0)

    def finish() -> list[Any]:
        divisor = options.backward_passes_per_step if options.average_aggregated_gradients else 1
        sums = [total / tf.cast(divisor, total.dtype) for total in distribution.sums]
        for total in distribution.sums:
            total.assign(tf.zeros_like(total))
        return _reduced(distribution, sums, are_local)

    return due, tf.cond(due, finish, lambda: gradients)


@as_written
def choose(due: Any, step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Do the one or the other; in a graph, where what they return must be alike, nothing comes back."""
    if due is True:
        return step()

    def nothing_after(work: Callable[[], Any]) -> Callable[[], Any]:
        def do() -> Any:
            work()
            return tf.constant(0)

        return do

    return tf.cond(due, nothing_after(step), nothing_after(skip))


@as_written
def agree(flag: Any, process_set: ProcessSet) -> Any:
    """Whether it is true on all ranks."""
    return tf.cast(collectives.allreduce(tf.cast(flag, tf.int32), op=MIN, process_set=process_set), tf.bool)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """One rank's values into the variables of all."""
    training.broadcast_variables(variables, root_rank)


def call(collective: str, value: Any, **options: Any) -> Any:
    """A collective on a value that may be anything TensorFlow makes a tensor of."""
    return getattr(collectives, collective)(tf.convert_to_tensor(value), **options)


def _make_sums(distribution: Any, gradients: Sequence[Any]) -> None:
    if distribution.sums:
        return
    with tf.init_scope():
        distribution.counter = tf.Variable(tf.constant(0), trainable=False, name="aggregation_counter")
        distribution.sums = [
            tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False) for gradient in gradients
        ]


def _reduced(distribution: Any, gradients: Sequence[Any], are_local: Sequence[bool]) -> list[Any]:
    options = distribution.options
    if not options.is_active:
        return list(gradients)
    reduction = Reduction(
        distribution.name,
        options.compression,
        options.sparse_as_dense,
        options.op,
        options.gradient_predivide_factor,
        None,
        options.process_set,
        options.scale_local_gradients,
    )
    return reduction.apply_to(gradients, are_local)
