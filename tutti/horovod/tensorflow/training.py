"""Broadcast of variables and objects, gradient tapes and optimizers for TensorFlow."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.engine.execute import is_power_of_two
from tutti.horovod.engine.messages import ADASUM
from tutti.horovod.gradients import Compression, ReductionOptions, identity, trained_in
from tutti.horovod.tensorflow.bridge import not_converted
from tutti.horovod.tensorflow.collectives import Average, broadcast_, grouped_allreduce
from tutti.horovod.torch import functions

# fmt: off
__all__ = [  # in the namespace horovod.tensorflow
    "DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape", "allgather_object",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
    "check_num_rank_power_of_2",
]
# fmt: on


@not_converted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Broadcast one rank's variables, of TensorFlow or Keras, to all ranks in one operation; also in a tf.function."""
    own = [tensorflow_variable(variable) for variable in variables]
    values = broadcast_(own, root_rank, "HorovodBroadcastVariables", process_set) if own else []
    return None if tf.executing_eagerly() else tf.group(*values)


@not_converted
def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast the global variables of one rank in a graph of TensorFlow 1."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution: TensorFlow 2 has no global variables. "
            "Please use hvd.broadcast_variables(<model/optimizer variables>) instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def tensorflow_variable(variable: Any) -> Any:
    """Return a variable of TensorFlow: the given one, or the one inside a variable of Keras 3."""
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
    """Broadcast one rank's object to all ranks; on that rank, return the object itself."""
    return functions.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that broadcasts one rank's object to all ranks."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks."""
    return functions.gather_objects(obj, name, process_set)


@dataclass(frozen=True)
class Reduction:
    """Reduces gradients as the options say, under one name."""

    name: str
    options: ReductionOptions

    def apply_to(self, gradients: Sequence[Any], are_local: Sequence[bool]) -> list[Any]:
        """Return gradients reduced over ranks, and those of variables that are local to this rank scaled."""
        pairs = list(zip(gradients, are_local, strict=True))
        shared = iter(self.apply([gradient for gradient, local in pairs if not local]))
        kept = iter(self.scaled([gradient for gradient, local in pairs if local]))
        return [next(kept if local else shared) for local in are_local]

    @not_converted
    def apply(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients reduced over ranks; unchanged on one rank, and on ranks outside the process set."""
        if not self._has_other_ranks():
            return list(gradients)
        return self._reduced([self._dense(gradient) for gradient in gradients])

    @not_converted
    def scaled(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients of local variables, divided by the number of ranks."""
        if not (self.options.scale_local_gradients and self._has_other_ranks()):
            return list(gradients)
        size = self.options.process_set.size()
        return [None if each is None else _times(each, 1.0 / size) for each in gradients]

    def _has_other_ranks(self) -> bool:
        return self.options.process_set.included() and self.options.process_set.size() > 1

    def _dense(self, gradient: Any) -> Any:
        is_slices = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if is_slices and self.options.sparse_as_dense else gradient

    def _reduced(self, gradients: Sequence[Any]) -> list[Any]:
        present, options = [gradient for gradient in gradients if gradient is not None], self.options
        factor = options.gradient_predivide_factor
        reduced = iter(
            grouped_allreduce(
                present,
                compression=options.compression,
                op=options.op,
                prescale_factor=1.0 / factor,
                postscale_factor=factor,
                process_set=options.process_set,
                name=self.name,
            )
        )
        return [None if gradient is None else next(reduced) for gradient in gradients]


@not_converted
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose gradients are reduced over ranks."""
    return _distributed_tape(gradtape, ReductionOptions.from_arguments(locals()))


@not_converted
def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose gradients are reduced over ranks, except those of layers that are local to each rank."""
    tape = _distributed_tape(gradtape, ReductionOptions.from_arguments(locals()))
    for variable in trained_in(local_layers):
        tape.register_local_source(variable)
    return tape


def _distributed_tape(gradtape: Any, options: ReductionOptions) -> Any:
    wrapped = type(gradtape)
    distributed = object.__new__(type(wrapped.__name__, (_DistributedTape, wrapped), {}))
    distributed.__dict__.update(gradtape.__dict__)  # with what it has recorded
    distributed._reduction, distributed._local_sources = Reduction("DistributedGradientTape_Allreduce", options), set()
    return distributed


class _DistributedTape:
    """The base class that precedes the class of a tape."""

    _reduction: Reduction
    _local_sources: set[int]

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a variable local to this rank."""
        self._local_sources.add(identity(source))

    @not_converted
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **rest: Any
    ) -> Any:
        """Return the gradients of a target, reduced over ranks."""
        own = super().gradient(target, sources, output_gradients, **rest)  # pyright: ignore[reportAttributeAccessIssue]
        are_local = [identity(source) in self._local_sources for source in _flat(sources)]
        reduced = self._reduction.apply_to(_flat(own), are_local)
        return tf.nest.pack_sequence_as(sources, reduced) if tf.nest.is_nested(sources) else reduced[0]

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of variables and gradients: first those local to this rank, then those of all ranks."""
        gradients = self.gradient(target, sources, output_gradients)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if identity(pair[0]) in self._local_sources]
        return local, [pair for pair in pairs if identity(pair[0]) not in self._local_sources]


def _flat(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure) if tf.nest.is_nested(structure) else [structure]


def _times(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return True, or raise NotImplementedError for a number of ranks that Adasum does not support."""
    if not is_power_of_two(num_rank):
        raise NotImplementedError(f"op=Adasum on {num_rank} ranks: expected 2, 4, 8, 16, ... ranks. Use another op.")
    return True


def refuse_adasum(op: int) -> None:
    """Raise ValueError for Adasum on several ranks, which optimizers of Keras do not support."""
    if op == ADASUM and basics.size() > 1:
        raise ValueError("op == Adasum is not supported yet with Keras: expected hvd.Average or hvd.Sum.")


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer of Keras, or of tf.compat.v1.train, whose gradients are reduced over ranks."""
    arguments = locals()
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step > 1:
            raise ValueError(
                f"backward_passes_per_step={backward_passes_per_step} with {type(optimizer).__name__} of "
                "tf.compat.v1.train: expected 1. Use an optimizer of Keras."
            )
        reduction = Reduction("DistributedOptimizer_Allreduce", ReductionOptions.from_arguments(arguments))
        return _DistributedGraphOptimizer(optimizer, reduction, name, use_locking)
    if not hasattr(optimizer, "apply_gradients"):
        raise ValueError(
            f"Provided optimizer is neither of legacy tf.train nor of Keras: {type(optimizer)}. "
            "Expected tf.keras.optimizers.Optimizer or tf.compat.v1.train.Optimizer."
        )
    refuse_adasum(op)
    from tutti.horovod.keras.optimizer import DistributionOptions, distribute

    return distribute(optimizer, DistributionOptions.from_arguments(arguments), name)


class _DistributedGraphOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer of TensorFlow 1, which computes gradients itself."""

    def __init__(self, optimizer: Any, reduction: Reduction, name: str | None, use_locking: bool) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._local_vars: set[int] = set()

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable local to this rank."""
        self._local_vars.add(identity(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of gradients, reduced over ranks, and variables."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        are_local = [identity(variable) in self._local_vars for variable in variables]
        return list(zip(self._reduction.apply_to(gradients, are_local), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self) -> Any:
        return self._optimizer.variables()
