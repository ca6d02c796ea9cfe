"""`import tutti.horovod.keras as hvd`: Horovod's API for Keras (horovod.keras)."""

# ruff: noqa: F401, F403

from typing import Any

from tutti.horovod.basics import *
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.gradients import Compression, trained_in
from tutti.horovod.keras import callbacks, elastic
from tutti.horovod.keras.backends import (
    allgather,
    allreduce_function,
    broadcast,
    broadcast_global_variables,
    keras_alone,
    reducescatter,
)
from tutti.horovod.keras.optimizer import DistributionOptions, distribute, load_model_function
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
    """Return an optimizer of the same class with the same state, whose steps use gradients reduced over ranks."""
    return distribute(optimizer, DistributionOptions.from_arguments(locals()), name)


def optimizer_of_tensorflow(
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
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the same optimizer, with the arguments of horovod.tensorflow.keras."""
    return distribute(optimizer, DistributionOptions.from_arguments(locals()), name)


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
    """Return a distributed optimizer that keeps the gradients of some layers local to each rank."""
    made = distribute(optimizer, DistributionOptions.from_arguments(locals()), name)
    for variable in trained_in(local_layers):
        made.register_local_var(variable)
    return made


allreduce = allreduce_function(default_average=True)
load_model = load_model_function(keras_alone)
