"""Collectives on values: numbers, arrays, or tensors of what Keras computes with."""

from typing import Any

from tutti.horovod.engine.messages import AVERAGE, SUM
from tutti.horovod.keras.backends import current
from tutti.horovod.keras.compression import Compression


def reduce_value(
    value: Any,
    name: str | None,
    average: bool | None,
    scales: tuple[float, float],
    op: int | None,
    compression: Any = Compression.none,
) -> Any:
    """A value reduced over ranks, by an operation or by the older word for it."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = op if op is not None else SUM if average is False else AVERAGE
    options = {"name": name, "op": chosen, "prescale_factor": scales[0], "postscale_factor": scales[1]}
    return current().call("allreduce", value, compression=compression, **options)


def allgather(value: Any, name: str | None = None) -> Any:
    """The rows of all ranks after each other."""
    return current().call("allgather", value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """A rank's value on all ranks."""
    return current().call("broadcast", value, root_rank=root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = AVERAGE) -> Any:
    """A value reduced over ranks, some of the rows on each."""
    return current().call("reducescatter", value, name=name, op=op)


def broadcast_global_variables(root_rank: int) -> None:
    """What TensorFlow 1 had: variables that everybody can see."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution: there are no global variables. "
        "Give hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit."
    )
