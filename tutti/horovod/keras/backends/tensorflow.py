"""Keras on TensorFlow, and Keras 2; in a graph, these functions add operations to it."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tutti.horovod.basics import ProcessSet
from tutti.horovod.engine.messages import MIN
from tutti.horovod.tensorflow import collectives, training
from tutti.horovod.tensorflow.bridge import not_converted
from tutti.horovod.tensorflow.training import Reduction


@not_converted
def exchange(distribution: Any, gradients: list[Any], are_local: list[bool]) -> tuple[Any, list[Any]]:
    """Return whether a step is due, and its gradients: reduced, or scaled where a variable is local to this rank."""
    if not distribution.accumulates:
        return True, _reduced(distribution, gradients, are_local)
    options = distribution.options
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients) and not options.sparse_as_dense:
        raise ValueError(
            "IndexedSlices with backward_passes_per_step > 1: sparse gradients cannot be added up over passes. "
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


@not_converted
def choose(due: Any, step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Call one of two functions; in a graph, where both must return the same structure, return nothing of use."""
    if due is True:
        return step()

    def without_result(function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            function()
            return tf.constant(0)

        return call

    return tf.cond(due, without_result(step), without_result(skip))


@not_converted
def agree(flag: Any, process_set: ProcessSet) -> Any:
    """Return whether a flag is true on all ranks."""
    return tf.cast(collectives.allreduce(tf.cast(flag, tf.int32), op=MIN, process_set=process_set), tf.bool)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Broadcast one rank's values to the variables of all ranks."""
    training.broadcast_variables(variables, root_rank)


def call(collective: str, value: Any, **options: Any) -> Any:
    """Apply a collective to a value that TensorFlow can convert to a tensor."""
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
    reduced = Reduction(distribution.name, options).apply_to(gradients, are_local)
    if distribution.observe is not None:
        distribution.observe(gradients, reduced)
    return reduced
