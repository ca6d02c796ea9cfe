"""Operations of the engine on tensors of TensorFlow: executed at once when eager, as nodes in a graph."""

import itertools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch.utils.dlpack import to_dlpack

from tutti.horovod import basics
from tutti.horovod.errors import SHUT_DOWN, HorovodInternalError
from tutti.horovod.torch.ops import forget, settle, synchronize
from tutti.horovod.torch.ops import join as join_ranks

# fmt: off
__all__ = [  # in the namespace horovod.tensorflow
    "join", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op",
]
# fmt: on

_ALIGNMENT = 64  # bytes: TensorFlow uses an array without a copy if it is aligned so
_MAX_FREE = 8  # unused buffers that are kept

_free: list[torch.Tensor] = []


def packed(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate one buffer for tensors of one dtype; return the buffer, and a view of it for each tensor."""
    width = tensors[0].element_size()
    sizes = [_ALIGNMENT * math.ceil(tensor.nbytes / _ALIGNMENT) // width for tensor in tensors]
    whole = allocate(sum(sizes) * width).view(tensors[0].dtype)
    parts = zip(whole.split(sizes), tensors, sizes, strict=True)
    return whole, [
        (part if tensor.numel() == size else part[: tensor.numel()]).view(tensor.shape) for part, tensor, size in parts
    ]


def allocate(size: int) -> torch.Tensor:
    """Return a buffer of some bytes, whose memory is reused once nothing refers to it."""
    fitting = [each for each in _free if len(each) == size]
    if fitting:
        kept = fitting[-1]
        _free[:] = [each for each in _free if each is not kept]
    else:
        kept = torch.empty(size, dtype=torch.uint8)
    array: np.ndarray = kept.numpy()
    weakref.finalize(array, _release, kept).atexit = False
    return torch.from_numpy(array)


def _release(kept: torch.Tensor) -> None:
    _free.append(kept)
    del _free[:-_MAX_FREE]


MAX_UNUSED = 16  # results of one operation that are kept: a graph does not fetch results that it does not need


class Submitted:
    """Operations that were submitted, with the tensors of their results; by default those that the engine returns."""

    def __init__(self, handles: list[int], results: list[torch.Tensor] | None = None) -> None:
        self.handles = handles
        self.results = results or []
        self.engine = basics.engine()  # of the job to which the handles belong
        self.name = ""

    def finish(self) -> list[torch.Tensor]:
        """Wait for the results."""
        returned = [each for handle in self.handles for each in _flat(synchronize(handle))]
        self.results = self.results or returned
        return self.results


not_converted = tf.autograph.experimental.do_not_convert  # tracing need not convert Python control flow
Submit = Callable[[str | None, list[torch.Tensor]], Submitted]  # from a name and the inputs

_submitted: dict[int, Submitted] = {}  # by graphs
_tickets = itertools.count()


def run_operation(
    kind: str,
    submit: Submit,
    inputs: Sequence[Any],
    outputs: Sequence[tuple[Any, Any]],
    name: str | None,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Run an operation and return its results; `outputs` are their dtypes and shapes, as far as they are known."""
    if tf.executing_eagerly():
        return _run_eagerly(kind, submit, inputs, name)
    return _add_to_graph(kind, submit, inputs, outputs, _graph_name(kind, inputs, name, ignore_name_scope))


def executing_eagerly() -> bool:
    """Return whether TensorFlow executes operations eagerly."""
    return tf.executing_eagerly()


def _run_eagerly(kind: str, submit: Submit, inputs: Sequence[Any], name: str | None) -> list[Any]:
    try:
        results = submit(name, [_to_torch(tensor) for tensor in inputs]).finish()
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, f"{kind}: {error}") from error
    except HorovodInternalError as error:
        has_ended = not basics.is_initialized() or SHUT_DOWN in str(error)
        error_type = tf.errors.UnknownError if has_ended else tf.errors.FailedPreconditionError
        raise error_type(None, None, f"{kind}: {error}") from error
    return [tf.experimental.dlpack.from_dlpack(to_dlpack(each)) for each in results]


def _add_to_graph(
    kind: str, submit: Submit, inputs: Sequence[Any], outputs: Sequence[tuple[Any, Any]], name: str
) -> list[Any]:
    def begin(*arrays: Any) -> np.int64:
        _settle_earlier(name)
        submitted = submit(name, [from_numpy(array) for array in arrays])
        submitted.name, ticket = name, next(_tickets)
        _submitted[ticket] = submitted
        return np.int64(ticket)

    def wait(ticket: np.int64) -> str:
        try:
            _submitted[int(ticket)].finish()
        except HorovodInternalError as error:
            if SHUT_DOWN in str(error):
                raise
            return f"{os.devnull}/{kind}: {error}"
        return os.devnull

    def take(ticket: np.int64, _: bytes) -> list[np.ndarray]:
        return [to_numpy(each) for each in _submitted.pop(int(ticket)).results]

    types = [dtype for dtype, _ in outputs]
    ticket = tf.numpy_function(begin, list(inputs), tf.int64, name=f"{kind}_begin")
    path = tf.numpy_function(wait, [ticket], tf.string, stateful=False, name=f"{kind}_wait")
    # An exception of Python in a graph becomes an UnknownError, but a mismatch between ranks must be a
    # FailedPreconditionError. TensorFlow raises that, with the path, for a file below one that is not a folder.
    nothing = tf.io.read_file(path)
    results = tf.numpy_function(take, [ticket, nothing], types, stateful=False, name=f"{kind}_end")
    results = list(results) if isinstance(results, list | tuple) else [results]
    for result, (_, shape) in zip(results, outputs, strict=True):
        result.set_shape(shape)
    return results


def _settle_earlier(name: str) -> None:
    """Wait for earlier operations of a name, which may be in flight once only, and drop old results without use."""
    earlier = [(ticket, each) for ticket, each in list(_submitted.items()) if each.name == name]
    unused = earlier[:-MAX_UNUSED]
    for ticket, _ in unused:
        _submitted.pop(ticket, None)
    for place, (_, each) in enumerate(earlier):
        for handle in each.handles if each.engine is basics.engine() else ():
            settle(handle)
            if place < len(unused):
                forget(handle)


def _graph_name(kind: str, inputs: Sequence[Any], name: str | None, ignore_name_scope: bool) -> str:
    """Return a name that is unique in the graph and does not depend on the order in which functions are traced."""
    graph: Any = tf.compat.v1.get_default_graph()
    if name is None:
        own = "" if isinstance(inputs[0], tf.__internal__.EagerTensor) else inputs[0].name
        name = f"{kind}_{''.join(c if c.isalnum() else '_' for c in own)}"
    if not ignore_name_scope:
        return graph.unique_name(name)
    with graph.name_scope(None):
        return graph.unique_name(name)


def _flat(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def _to_torch(tensor: Any) -> torch.Tensor:
    """Return a tensor on the same memory, or a copy from a GPU."""
    if "CPU" not in tensor.device:
        with tf.device("CPU:0"):
            tensor = tf.identity(tensor)
    return torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def from_numpy(array: Any) -> torch.Tensor:
    """Return a tensor on the same memory; what is not writable, such as a single number, is copied."""
    array = np.asarray(array)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == tf.bfloat16.as_numpy_dtype:  # a dtype that NumPy does not have itself
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return an array on the same memory."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()


@not_converted
def join() -> Any:
    """Contribute zeros until all ranks have joined, since this rank has no more data; return the last rank to join."""
    try:
        return _integer(join_ranks, "HorovodJoin")
    except HorovodInternalError as error:
        raise tf.errors.UnknownError(None, None, f"HorovodJoin: {error}") from error


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set when the graph runs."""
    return _integer(lambda: len(basics.engine().sets[process_set_id].ranks), name or "HorovodSize")


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host when the graph runs."""
    return _integer(basics.local_size, name or "HorovodLocalSize")


def rank_op(name: str | None = None) -> Any:
    """Return this rank when the graph runs."""
    return _integer(basics.rank, name or "HorovodRank")


def local_rank_op(name: str | None = None) -> Any:
    """Return the local rank when the graph runs."""
    return _integer(basics.local_rank, name or "HorovodLocalRank")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return whether this rank is in a process set when the graph runs: 1, 0, or -1 if there is no such set."""

    def included() -> int:
        members = basics.engine().sets.get(process_set_id)
        return -1 if members is None else int(basics.rank() in members.ranks)

    return _integer(included, name or "HorovodProcessSetIncluded")


@not_converted
def _integer(function: Callable[[], int], name: str) -> Any:
    """Return the result of a function: of a call now when eager, of a call when the graph runs otherwise."""
    if tf.executing_eagerly():
        return tf.constant(function(), tf.int32)
    result = tf.numpy_function(lambda: tf.int32.as_numpy_dtype(function()), [], tf.int32, name=name)
    result.set_shape([])
    return result
