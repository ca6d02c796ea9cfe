"""Elastic training with Keras: `elastic.run`, the state of a model and its optimizer, and callbacks."""

import functools
from collections.abc import Callable
from typing import Any

from tutti.horovod import basics
from tutti.horovod.elastic import ObjectState, run_fn
from tutti.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from tutti.horovod.gradients import variables_of
from tutti.horovod.keras.backends import backend_of
from tutti.horovod.keras.callbacks import RankCallback
from tutti.horovod.torch.elastic import broadcast_from_first, reset

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function of a state: it resumes when ranks are lost, and continues when hosts change."""

    @functools.wraps(func)
    def with_internal_errors(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except (HorovodInternalError, HostsUpdatedInterrupt):
            raise
        except Exception as error:
            raise _internal_error(error) from error

    return run_fn(with_internal_errors, reset)


class KerasState(ObjectState):
    """A model that is built, its optimizer and any other values, each an attribute."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self._saved_variables = self._values()
        super().__init__(broadcast_from_first, basics.rank, **kwargs)

    def save(self) -> None:
        self._saved_variables = self._values()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._variables(), self._saved_variables, strict=False):
            variable.assign(value)
        if hasattr(self.model, "jax_state_sync"):
            self.model._jax_state = None  # of a step that was interrupted
        super().restore()

    def sync(self) -> None:
        self._update_from_jax()
        backend_of(self.model).broadcast_variables(self._variables(), 0)
        self._saved_variables = self._values()
        super().sync()

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *variables_of(self.optimizer)]

    def _values(self) -> list[Any]:
        self._update_from_jax()
        return [variable.numpy().copy() for variable in self._variables()]

    def _update_from_jax(self) -> None:
        """Update the variables of a model on jax, which keeps their values elsewhere during training."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()


class CommitStateCallback(RankCallback):
    """Commits the state after every `batches_per_commit` batches, and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(RankCallback):
    """Counts the completed batches of an epoch in `state.batch`; an interrupted epoch is shortened by them."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.params.get("steps"):
            self.steps_per_epoch = self.steps_per_epoch or self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(RankCallback):
    """Counts the completed epochs in `state.epoch`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1


def _internal_error(error: Exception) -> Exception:
    """Return HorovodInternalError for an error of TensorFlow or jax that it caused; other errors unchanged."""
    cause: BaseException | None = error
    while cause is not None:
        is_of_framework = type(cause).__module__.startswith(("tensorflow.", "jax"))
        if isinstance(cause, HorovodInternalError) or (is_of_framework and "Horovod" in str(cause)):
            return HorovodInternalError(str(cause))
        cause = cause.__cause__ or cause.__context__
    return error
