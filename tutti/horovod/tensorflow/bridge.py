"""Tensors of TensorFlow in operations of the engine: executed at once when eager, as two nodes in a graph."""

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

_LINE = 64  # bytes: where TensorFlow takes an array over as it is, and vectors of the processor begin
_MOST_KEPT = 8  # pieces that nobody uses

_free: list[torch.Tensor] = []


def side_by_side(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Memory for tensors of one type in one piece: the whole of it, and a place for each of them."""
    width = tensors[0].element_size()
    sizes = [_LINE * math.ceil(tensor.nbytes / _LINE) // width for tensor in tensors]
    whole = take(sum(sizes) * width).view(tensors[0].dtype)
    parts = zip(whole.split(sizes), tensors, sizes, strict=True)
    return whole, [
        (part if tensor.numel() == size else part[: tensor.numel()]).view(tensor.shape) for part, tensor, size in parts
    ]


def take(size: int) -> torch.Tensor:
    """So many bytes; the memory comes back when nothing refers to them any more."""
    fitting = [each for each in _free if len(each) == size]
    if fitting:
        kept = fitting[-1]
        _free[:] = [each for each in _free if each is not kept]
    else:
        kept = torch.empty(size, dtype=torch.uint8)
    lent: np.ndarray = kept.numpy()
    weakref.finalize(lent, _give_back, kept).atexit = False
    return torch.from_numpy(lent)


def _give_back(kept: torch.Tensor) -> None:
    _free.append(kept)
    del _free[:-_MOST_KEPT]


UNCLAIMED = 16  # results of one operation that nobody has asked for: a graph leaves out ends that it needs not


class Begun:
    """What has been submitted, with the tensors where its results will be; by default those that the engine gives."""

    def __init__(self, handles: list[int], results: list[torch.Tensor] | None = None) -> None:
        self.handles = handles
        self.results = results or []
        self.engine = basics.engine()  # of the job in which its handles mean something
        self.name = ""

    def finish(self) -> list[torch.Tensor]:
        """Wait for the results."""
        given = [each for handle in self.handles for each in _flat(synchronize(handle))]
        self.results = self.results or given
        return self.results


as_written = tf.autograph.experimental.do_not_convert  # nothing here needs rewriting when a function is traced
Submit = Callable[[str | None, list[torch.Tensor]], Begun]  # from a name and what goes in

_begun: dict[int, Begun] = {}  # in graphs
_tickets = itertools.count()


def carry_out(
    kind: str,
    submit: Submit,
    inputs: Sequence[Any],
    outputs: Sequence[tuple[Any, Any]],
    name: str | None,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """The results of an operation on tensors, whose types and shapes (as far as they are known) are `outputs`."""
    if tf.executing_eagerly():
        return _at_once(kind, submit, inputs, name)
    return _in_graph(kind, submit, inputs, outputs, _graph_name(kind, inputs, name, ignore_name_scope))


def executing_eagerly() -> bool:
    """Whether operations are done as they are called."""
    return tf.executing_eagerly()


def _at_once(kind: str, submit: Submit, inputs: Sequence[Any], name: str | None) -> list[Any]:
    try:
        results = submit(name, [_to_torch(tensor) for tensor in inputs]).finish()
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, f"{kind}: {error}") from error
    except HorovodInternalError as error:
        lost = not basics.is_initialized() or SHUT_DOWN in str(error)
        kind_of_error = tf.errors.UnknownError if lost else tf.errors.FailedPreconditionError
        raise kind_of_error(None, None, f"{kind}: {error}") from error
    return [tf.experimental.dlpack.from_dlpack(to_dlpack(each)) for each in results]


def _in_graph(
    kind: str, submit: Submit, inputs: Sequence[Any], outputs: Sequence[tuple[Any, Any]], name: str
) -> list[Any]:
    def begin(*arrays: Any) -> np.int64:
        _make_room(name)
        begun = submit(name, [from_numpy(array) for array in arrays])
        begun.name, ticket = name, next(_tickets)
        _begun[ticket] = begun
        return np.int64(ticket)

    def wait(ticket: np.int64) -> str:
        try:
            _begun[int(ticket)].finish()
        except HorovodInternalError as error:
            if SHUT_DOWN in str(error):
                raise
            return f"{os.devnull}/{kind}: {error}"
        return os.devnull

    def take(ticket: np.int64, _: bytes) -> list[np.ndarray]:
        return [to_numpy(each) for each in _begun.pop(int(ticket)).results]

    types = [dtype for dtype, _ in outputs]
    ticket = tf.numpy_function(begin, list(inputs), tf.int64, name=f"{kind}_begin")
    fate = tf.numpy_function(wait, [ticket], tf.string, stateful=False, name=f"{kind}_wait")
    # For a graph, all that Python raises is an UnknownError. What ranks disagree about is a FailedPreconditionError:
    # that is what it says, with the whole name, of a file inside of one that is no folder.
    nothing = tf.io.read_file(fate)
    results = tf.numpy_function(take, [ticket, nothing], types, stateful=False, name=f"{kind}_end")
    results = list(results) if isinstance(results, list | tuple) else [results]
    for result, (_, shape) in zip(results, outputs, strict=True):
        result.set_shape(shape)
    return results


def _make_room(name: str) -> None:
    """A name is in flight once; results of it that nobody asks for are given up after a while."""
    everything = list(_begun.items())  # at once: other threads begin and end theirs
    earlier = [(ticket, begun) for ticket, begun in everything if begun.name == name]
    for _, begun in earlier:
        if begun.engine is basics.engine():
            for handle in begun.handles:
                settle(handle)
    for ticket, begun in earlier[:-UNCLAIMED]:
        _begun.pop(ticket, None)
        if begun.engine is basics.engine():
            for handle in begun.handles:
                forget(handle)


def _graph_name(kind: str, inputs: Sequence[Any], name: str | None, ignore_name_scope: bool) -> str:
    """By what a graph calls it, and once in each graph: the order in which functions are traced does not matter."""
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
    """The same memory, or a copy from a GPU."""
    if "CPU" not in tensor.device:
        with tf.device("CPU:0"):
            tensor = tf.identity(tensor)
    return torch.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def from_numpy(array: Any) -> torch.Tensor:
    """The same memory; a number by itself is copied."""
    array = np.asarray(array)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == tf.bfloat16.as_numpy_dtype:  # which NumPy knows by another package
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()


@as_written
def join() -> Any:
    """Say that this rank has no more data, and lend zeros until all have; the rank that came last."""
    if tf.executing_eagerly():
        try:
            return tf.constant(join_ranks(), tf.int32)
        except HorovodInternalError as error:
            raise tf.errors.UnknownError(None, None, f"HorovodJoin: {error}") from error
    last = tf.numpy_function(lambda: tf.int32.as_numpy_dtype(join_ranks()), [], tf.int32, name="HorovodJoin")
    last.set_shape([])
    return last


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks of a set, when the graph runs."""
    return _asked(lambda: len(basics.engine().sets[process_set_id].ranks), name or "HorovodSize")


def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host, when the graph runs."""
    return _asked(basics.local_size, name or "HorovodLocalSize")


def rank_op(name: str | None = None) -> Any:
    """This rank, when the graph runs."""
    return _asked(basics.rank, name or "HorovodRank")


def local_rank_op(name: str | None = None) -> Any:
    """This rank's place on its host, when the graph runs."""
    return _asked(basics.local_rank, name or "HorovodLocalRank")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this rank is in a set, when the graph runs: 1, 0, or -1 where there is no such set."""

    def included() -> int:
        members = basics.engine().sets.get(process_set_id)
        return -1 if members is None else int(basics.rank() in members.ranks)

    return _asked(included, name or "HorovodProcessSetIncluded")


@as_written
def _asked(answer: Callable[[], int], name: str) -> Any:
    if tf.executing_eagerly():
        return tf.constant(answer(), tf.int32)
    answered = tf.numpy_function(lambda: tf.int32.as_numpy_dtype(answer()), [], tf.int32, name=name)
    answered.set_shape([])
    return answered
