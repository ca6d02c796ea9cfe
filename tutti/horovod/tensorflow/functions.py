"""Variables and plain objects from one rank to all, or from all to all."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.tensorflow.bridge import as_written
from tutti.horovod.tensorflow.collectives import broadcast_
from tutti.horovod.torch import functions


@as_written
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Put one rank's variables into those of all ranks, in one call; TensorFlow's or Keras' own, also in a function."""
    own = [tensorflow_variable(variable) for variable in variables]
    values = broadcast_(own, root_rank, "HorovodBroadcastVariables", process_set) if own else []
    return None if tf.executing_eagerly() else tf.group(*values)


@as_written
def broadcast_global_variables(root_rank: int) -> Any:
    """Put one rank's variables into those of all ranks, where everybody can see them: in a graph of TensorFlow 1."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution: TensorFlow 2 has no global variables. "
            "Please use hvd.broadcast_variables(<model/optimizer variables>) instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def tensorflow_variable(variable: Any) -> Any:
    """The variable of TensorFlow that is meant: itself, or what Keras 3 keeps in its own."""
    inner = getattr(variable, "value", None)
    found = variable if inner is None or callable(inner) else inner
    if not hasattr(found, "assign"):
        raise ValueError(
            f"{type(variable)} cannot be assigned to: expected tf.Variable, or a variable of Keras on the tensorflow "
            "backend. Set KERAS_BACKEND=tensorflow, or use the callbacks of horovod.keras."
        )
    return found


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """One rank's object on all ranks; that rank gets its own back."""
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that puts one rank's object on all ranks."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of ranks."""
    return functions.gather_objects(obj, name, process_set)
