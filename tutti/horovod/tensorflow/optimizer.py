"""Optimizers whose gradients are reduced over ranks before they are applied."""

from typing import Any

import tensorflow as tf

from tutti.horovod.basics import global_process_set
from tutti.horovod.process_sets import ProcessSet
from tutti.horovod.tensorflow.collectives import Average
from tutti.horovod.tensorflow.compression import Compression
from tutti.horovod.tensorflow.gradients import Reduction, refuse_adasum
from tutti.horovod.variables import identity


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
    """An optimizer of Keras, or of tf.compat.v1.train, whose gradients are reduced over ranks."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step > 1:
            raise ValueError(
                f"backward_passes_per_step={backward_passes_per_step} with {type(optimizer).__name__} of "
                "tf.compat.v1.train: expected 1. Use an optimizer of Keras."
            )
        reduction = Reduction(
            "DistributedOptimizer_Allreduce",
            compression,
            sparse_as_dense,
            op,
            gradient_predivide_factor,
            groups if groups is not None else num_groups or None,
            process_set,
            scale_local_gradients,
        )
        return _DistributedOptimizer(optimizer, reduction, name, use_locking)
    if not hasattr(optimizer, "apply_gradients"):
        raise ValueError(
            f"Provided optimizer is neither of legacy tf.train nor of Keras: {type(optimizer)}. "
            "Expected tf.keras.optimizers.Optimizer or tf.compat.v1.train.Optimizer."
        )
    refuse_adasum(op)
    from tutti.horovod.keras.of_tensorflow import DistributedOptimizer as KerasOptimizer

    return KerasOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """Around an optimizer of TensorFlow 1, which computes gradients itself."""

    def __init__(self, optimizer: Any, reduction: Reduction, name: str | None, use_locking: bool) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._local_vars: set[int] = set()

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._local_vars.add(identity(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Pairs of gradients, reduced over ranks, and variables."""
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
