"""Callbacks for `fit`: broadcast of initial weights, metrics averaged over ranks, and learning-rate schedules."""

from collections.abc import Callable
from typing import Any

import torch

from tutti.errors import ConfigError
from tutti.horovod import basics
from tutti.horovod.gradients import identity, variables_of
from tutti.horovod.keras.backends import backend_of, keras_alone
from tutti.horovod.keras.patches import switch_off_jit
from tutti.horovod.torch.collectives import allreduce
from tutti.horovod.torch.functions import allgather_object


def correct_momentum(optimizer: Any, new_rate: float, old_rate: float) -> Callable[[], None] | None:
    """Scale momentum by the change of the learning rate for one batch; return a function that undoes it, if needed."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = getattr(inner, "momentum", None)
    if momentum is None or not old_rate or new_rate == old_rate:
        return None
    factor = new_rate / old_rate
    if hasattr(inner, "_set_hyper"):  # Keras 2: the momentum can be assigned
        kept = float(momentum)
        inner.momentum = kept * factor
        return lambda: setattr(inner, "momentum", kept)
    # In Keras 3 the momentum is a constant of the compiled step: scaling the velocities has the same effect.
    velocities = getattr(inner, "momentums", None) or getattr(inner, "_momentums", ())
    for velocity in velocities if momentum else ():
        if velocity is not None:
            velocity.assign(velocity * factor)
    return None


keras = keras_alone()


class RankCallback(keras.callbacks.Callback):
    """The base of the callbacks: a callback of Keras 3 that Keras 2 accepts too."""

    _supports_tf_logs = False
    _chief_worker_only = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        switch_off_jit(model)

    def _implements_train_batch_hooks(self) -> bool:
        hooks = self.on_batch_begin, self.on_batch_end, self.on_train_batch_begin, self.on_train_batch_end
        return not all(getattr(hook, "_is_default", False) for hook in hooks)

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastGlobalVariablesCallback(RankCallback):
    """Broadcasts one rank's variables after the first batch, when the optimizer has its own, and at the end."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = {identity(variable) for variable in local_variables or ()}
        self.broadcast_done = False

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        model = self.model
        shared = [variable for variable in model.weights if identity(variable) not in self.local_variables]
        backend = backend_of(model)
        if basics.size() > 1:
            backend.broadcast_variables(shared + variables_of(model.optimizer), self.root_rank)
        self.broadcast_done = True

    def on_train_end(self, logs: Any = None) -> None:
        """Broadcast what each rank has accumulated locally, such as the running statistics of batch norm."""
        statistics = [each for each in self.model.non_trainable_weights if identity(each) not in self.local_variables]
        if statistics and self.broadcast_done and basics.size() > 1:
            backend_of(self.model).broadcast_variables(statistics, self.root_rank)


class MetricAverageCallback(RankCallback):
    """Replaces every metric of an epoch by its mean over ranks; list it before the callbacks that use metrics."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if basics.size() == 1:
            return
        logs = {} if logs is None else logs
        names = sorted(logs)
        self._check(allgather_object(names, "metric_names"))
        if not names:
            return
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
        logs.update(zip(names, allreduce(values, name="metrics").tolist(), strict=True))

    def _check(self, names_of_ranks: list[list[str]]) -> None:
        """Raise ConfigError on all ranks if one of them lacks a metric that another has."""
        known = sorted(set().union(*names_of_ranks))
        missing = {rank: [name for name in known if name not in names] for rank, names in enumerate(names_of_ranks)}
        missing = {rank: names for rank, names in missing.items() if names}
        if missing:
            where = "; ".join(f"rank {rank} lacks {', '.join(names)}" for rank, names in missing.items())
            raise ConfigError(
                f"Metrics differ between ranks: {where}. Expected the same metrics on every rank to average them. "
                "Give the same metrics, validation_data and callbacks to all ranks."
            )


class LearningRateScheduleCallback(RankCallback):
    """Multiplies the initial learning rate by a function of the epoch, or by a power of a number."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not initial_lr:
            raise ValueError(f"initial_lr={initial_lr!r}: Parameter `initial_lr` is required, a learning rate above 0.")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase or not callable(multiplier)
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch = 0
        self._restore: Callable[[], None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._steps_of_an_epoch()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._adjust(epoch)
        else:
            assert self.steps_per_epoch is not None
            self._adjust(epoch + float(batch) / self.steps_per_epoch)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = rate_of(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction:
            self._restore = correct_momentum(optimizer, new, old)

    def _steps_of_an_epoch(self) -> int:
        params = self.params or {}
        if params.get("steps"):
            return params["steps"]
        if params.get("samples") and params.get("batch_size"):
            return params["samples"] // params["batch_size"]
        raise ValueError(
            "Could not autodetect the number of steps per epoch. "
            f"Please specify the steps_per_epoch parameter to the {type(self).__name__}()."
        )


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate in the first epochs from that of one rank to that of all ranks."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch  # so that the last step of an epoch counts as the whole epoch
            size = basics.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = rate_of(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model to `filepath`, which is set after construction."""

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: Any = "epoch"
    ) -> None:
        super().__init__("best.keras", monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)
        self.filepath: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        check_path(self)
        super().on_train_begin(logs)


def check_path(checkpoint: Any) -> None:
    """Raise ConfigError for a checkpoint whose `filepath` is not set when training begins."""
    if checkpoint.filepath is None:
        raise ConfigError(
            "BestModelCheckpoint has no file to write to: expected its filepath to be set before fit. "
            'Write for example checkpoint.filepath = "best.keras".'
        )


def rate_of(optimizer: Any) -> float:
    """Return the learning rate of the next step."""
    rate = optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)
