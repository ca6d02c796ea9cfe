"""A Keras model with its loss, its metrics and its optimizer, and what a run needs of them, on any backend."""

import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch

from tutti.config import parts
from tutti.config.framework import keras_backend
from tutti.config.run import RunConfig
from tutti.ranks.group import Group
from tutti.ranks.seeds import mix


def cross_entropy(label_smoothing: float = 0.0) -> keras.losses.Loss:
    """The mean cross entropy of class scores, with labels as numbers of classes."""
    if not label_smoothing:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return SmoothedCrossEntropy(label_smoothing)


class SmoothedCrossEntropy(keras.losses.Loss):
    """Cross entropy with a share of each label spread over all classes."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__(name="smoothed_cross_entropy")
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        wanted = keras.ops.one_hot(keras.ops.cast(y_true, "int32"), y_pred.shape[-1])
        return keras.losses.categorical_crossentropy(
            wanted, y_pred, from_logits=True, label_smoothing=self.label_smoothing
        )


Arrays = tuple[np.ndarray, np.ndarray]  # inputs with channels innermost, and labels
_METRICS = {
    "accuracy": lambda _: keras.metrics.SparseCategoricalAccuracy("accuracy"),
    "top5": lambda classes: keras.metrics.SparseTopKCategoricalAccuracy(min(5, classes), "top5"),
}


class Network:
    """`core` is the model that is saved; `model` has the same layers and is compiled, for `fit` and `evaluate`."""

    def __init__(self, config: RunConfig, input_shape: tuple[int, ...], num_classes: int) -> None:
        _seed(config.seed)  # the same first weights on every rank
        shapes = {"input_shape": input_shape, "num_classes": num_classes}
        self.core: keras.Model = parts.call(config.model.locate_in_keras(), "model", config.model.options(), **shapes)
        self.model: Any = keras.Model(self.core.inputs, self.core.outputs)
        self.criterion = parts.call(config.loss.locate_in_keras(), "loss", config.loss.options())
        self.metrics = [_METRICS[name](num_classes) for name in config.metrics]
        self.names = ("loss", *config.metrics)
        self.optimizer = _build_optimizer(config)
        # Compiled for TensorFlow's XLA, a step could not wait for other ranks; JAX has nothing but XLA.
        compiled = keras_backend(config) == "jax"
        self.model.compile(self.optimizer, self.criterion, metrics=self.metrics, jit_compile=compiled)
        self.optimizer.build(self.model.trainable_variables)
        self._rate: float | None = None

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(variable.shape)) for variable in self.core.trainable_weights)

    # The rate, the seeds, the loss before training.

    def set_rate(self, lr: float) -> None:
        """Have the next step made at a rate."""
        if lr != self._rate:
            self.sync()
            self.optimizer.learning_rate = lr
            self._rate = lr

    def seed_dropout(self, seed: int, rank: int, step: int) -> None:
        """Have each layer that draws do so by the seed, its place, the rank and the step."""
        states = [v for v in self.model.non_trainable_variables if v.name == "seed_generator_state"]
        for place, state in enumerate(states):
            state.assign(np.array([mix(seed, rank, place) % (1 << 31), step]))

    def loss_of(self, batch: Arrays) -> float:
        """The loss of a training batch; nothing of the pass is kept."""
        before = [(variable, _array(variable)) for variable in self.model.non_trainable_variables]
        inputs, labels = batch
        scores = self.model(keras.ops.convert_to_tensor(inputs), training=True)
        loss = float(_array(self.criterion(keras.ops.convert_to_tensor(labels), scores)))
        for variable, value in before:
            variable.assign(value)
        return loss

    # What was measured.

    @property
    def measures(self) -> list[Any]:
        """The running mean of the loss, then of each metric."""
        return [next(metric for metric in self.model.metrics if metric.name == "loss"), *self.metrics]

    def totals(self) -> torch.Tensor:
        """The sums of loss and metrics on this rank since they were cleared, then their weights."""
        self.sync()
        measures = self.measures
        values = [m.total for m in measures] + [m.count for m in measures]
        return torch.tensor([float(_array(value)) for value in values], dtype=torch.float64)

    def clear(self) -> None:
        for metric in self.measures:
            metric.reset_state()

    def evaluate(self, batches: Iterator[Arrays], count: int) -> torch.Tensor:
        """The totals over some batches, without training on them."""
        self.sync()
        self.clear()
        if count:
            self.model.evaluate(batches, steps=count, verbose=0)
        totals = self.totals()
        self.clear()
        return totals

    # Ranks, and what is saved.

    def combine_ranks(self, group: Group) -> None:
        """Put the mean over ranks into the running statistics of batch norm, which each rank has from its own share."""
        variables = self.core.non_trainable_weights
        if group.world_size == 1 or not variables:
            return
        self.sync()
        values = [_array(variable) for variable in variables]
        flat = torch.from_numpy(np.concatenate([value.ravel() for value in values]).astype(np.float64))
        means = (group.sum(flat) / group.world_size).numpy()
        ends = np.cumsum([value.size for value in values])[:-1]
        for variable, value, mean in zip(variables, values, np.split(means, ends), strict=True):
            variable.assign(mean.reshape(value.shape).astype(value.dtype))

    def state(self) -> list[Any]:
        """The variables that are the same on all ranks: trained weights, and what the optimizer keeps."""
        self.sync()
        return [*self.core.trainable_weights, *self.optimizer.variables]

    def sync(self) -> None:
        """On JAX, put the values that `fit` passes from step to step back into the variables."""
        getattr(self.model, "jax_state_sync", lambda: None)()


def _seed(seed: int) -> None:
    """Seed what Keras draws its own seeds from; its function for this imports TensorFlow on any backend."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def _build_optimizer(config: RunConfig) -> Any:
    options = config.optim.options() | {"clip_norm": config.optim.clip_norm}
    optimizer = parts.call(config.optim.locate_in_keras(), "optim", options)
    if config.precision == "fp16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if config.framework == "tensorflow":
        return optimizer  # the tape averages the gradients
    from tutti.horovod.keras import DistributedOptimizer

    return DistributedOptimizer(optimizer)  # outside: whether gradients are finite is then asked of their mean


def _array(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))
