"""Elastic training with TensorFlow: `elastic.run`, and the state of variables or of a Keras model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tutti.horovod import basics
from tutti.horovod.elastic import ObjectState, run_fn
from tutti.horovod.errors import HorovodInternalError
from tutti.horovod.gradients import variables_of
from tutti.horovod.tensorflow.training import broadcast_variables, tensorflow_variable
from tutti.horovod.torch.elastic import broadcast_from_first, reset

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function of a state: it resumes when ranks are lost, and continues when hosts change."""

    @functools.wraps(func)
    def with_internal_errors(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except (tf.errors.UnknownError, tf.errors.FailedPreconditionError) as error:
            if "Horovod" in str(error):  # the name of an operation, or of an error inside a graph
                raise HorovodInternalError(str(error)) from error
            raise

    return run_fn(with_internal_errors, reset)


class TensorFlowState(ObjectState):
    """Variables and any other values, each an attribute."""

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self._given_variables = variables
        self._values: list[np.ndarray] = []
        super().__init__(broadcast_from_first, basics.rank, **kwargs)
        self._copy_values()

    def variables(self) -> list[Any]:
        """Return the variables of the state; an optimizer may have more after its first step."""
        return [tensorflow_variable(variable) for variable in self._given_variables or ()]

    def save(self) -> None:
        self._copy_values()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables(), self._values, strict=False):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self.variables(), root_rank=0)
        self._copy_values()
        super().sync()

    def _copy_values(self) -> None:
        self._values = [variable.numpy() for variable in self.variables()]


class TensorFlowKerasState(TensorFlowState):
    """A Keras model that is built, its optimizer, and any other values."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`, or call it once on a batch, and then "
                "create the state."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(**kwargs)

    def variables(self) -> list[Any]:
        variables = [*variables_of(self.model), *variables_of(self.optimizer)]
        return [tensorflow_variable(variable) for variable in variables if not _is_random_state(variable)]


def _is_random_state(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator, which differs between ranks."""
    return "seed_generator" in str(getattr(variable, "path", getattr(variable, "name", "")))
