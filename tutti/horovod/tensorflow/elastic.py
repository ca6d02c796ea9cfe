"""Elastic training with TensorFlow: `elastic.run`, and the state of variables or of a Keras model."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tutti.horovod import basics
from tutti.horovod.elastic import ObjectState, run_fn
from tutti.horovod.errors import HorovodInternalError
from tutti.horovod.gradients import variables_of
from tutti.horovod.tensorflow.training import broadcast_object, broadcast_variables, tensorflow_variable
from tutti.horovod.torch import ops

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is the state: it survives the loss of ranks and new hosts."""

    def translated(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except (tf.errors.UnknownError, tf.errors.FailedPreconditionError) as error:
            if "Horovod" in str(error):  # the name of an operation, or of our error inside a graph
                raise HorovodInternalError(str(error)) from error
            raise

    translated.__name__, translated.__doc__ = func.__name__, func.__doc__
    return run_fn(translated, reset)


def reset() -> None:
    """Leave the job and join the next one."""
    ops.shutdown()
    ops.init()


class TensorFlowState(ObjectState):
    """Variables and any other values, each an attribute."""

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self._given = variables
        self._values: list[np.ndarray] = []
        super().__init__(_from_first, basics.rank, **kwargs)
        self._keep()

    def variables(self) -> list[Any]:
        """What is kept besides the values; an optimizer may have more after its first step."""
        return [tensorflow_variable(variable) for variable in self._given or ()]

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables(), self._values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self.variables(), root_rank=0)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        self._values = [variable.numpy() for variable in self.variables()]


class TensorFlowKerasState(TensorFlowState):
    """A model of Keras that has been built, its optimizer, and any other values."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`, or call it once on a batch, and then "
                "make the state."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(**kwargs)

    def variables(self) -> list[Any]:
        held = [*variables_of(self.model), *variables_of(self.optimizer)]
        return [tensorflow_variable(variable) for variable in held if _is_number(variable)]


def _is_number(variable: Any) -> bool:
    """Not the state of a random generator, which is each rank's own."""
    return "seed_generator" not in str(getattr(variable, "path", getattr(variable, "name", "")))


def _from_first(item: Any) -> Any:
    return broadcast_object(item, 0, name="elastic_state")
