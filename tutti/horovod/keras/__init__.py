"""`import tutti.horovod.keras as hvd`: Horovod's API for Keras, by its names (horovod.keras)."""

# ruff: noqa: F401, F403

from typing import Any

from tutti.horovod.basics import *
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.gradients import Compression, trained_in
from tutti.horovod.keras import callbacks, elastic
from tutti.horovod.keras.backends import (
    allgather,
    broadcast,
    broadcast_global_variables,
    keras_alone,
    reduce_value,
    reducescatter,
)
from tutti.horovod.keras.optimizer import Options, distribute, load
from tutti.horovod.torch.ops import Adasum, Average, Sum, init, shutdown


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """An optimizer of the same class and with the same state, whose steps use gradients reduced over ranks."""
    options = Options(compression, sparse_as_dense, gradient_predivide_factor, op, num_groups=num_groups, groups=groups)
    return distribute(optimizer, options, name)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """The same, with the gradients of some layers left to each rank."""
    options = Options(
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    made = distribute(optimizer, options, name)
    for variable in trained_in(local_layers):
        made.register_local_var(variable)
    return made


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """A value reduced over ranks."""
    return reduce_value(value, name, average, (prescale_factor, postscale_factor), op, compression)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model, whose optimizer is distributed and has the state that was saved."""
    return load(keras_alone(), filepath, custom_optimizers, custom_objects, compression)
