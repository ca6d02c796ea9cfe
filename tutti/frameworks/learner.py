"""The learner of Keras and TensorFlow: a model with its loss, metrics and optimizer, on any backend of Keras."""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from tutti.checkpoint.manifest import verify
from tutti.checkpoint.weights import StartingPoint, find_folder
from tutti.config import parts
from tutti.config.framework import keras_backend
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schema import InitConfig
from tutti.data.loader import RankBatch
from tutti.errors import CheckpointError, ConfigError
from tutti.frameworks.feed import as_arrays, evaluation_feed
from tutti.frameworks.machine import quiet_import
from tutti.ranks.device import mix
from tutti.ranks.group import Group
from tutti.runs.files import sync_path
from tutti.runs.noise_scale import EVERY_STEPS
from tutti.train.timing import NoTimer, StepTimer

MODEL_FILE, OPTIMIZER_FILE = "model.keras", "optimizer.npz"


def cross_entropy(label_smoothing: float = 0.0) -> keras.losses.Loss:
    """The mean cross entropy of class scores, with class numbers as labels."""
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


_METRICS = {
    "accuracy": lambda _: keras.metrics.SparseCategoricalAccuracy("accuracy"),
    "top5": lambda classes: keras.metrics.SparseTopKCategoricalAccuracy(min(5, classes), "top5"),
}


class _EndsEarly(keras.callbacks.Callback):
    """Ends an evaluation after a batch where it is not to go on."""

    def __init__(self, goes_on: Callable[[], bool]) -> None:
        super().__init__()
        self._goes_on = goes_on

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._goes_on() and self.model is not None:
            self.model.stop_evaluating = True


class HostSquares:
    """Squared norms of this rank's gradients and of their mean over ranks, by step; on the torch and jax backends."""

    def __init__(self, optimizer: Any) -> None:
        self._scale_of = getattr(optimizer, "dynamic_scale", None)  # of the loss, in fp16
        self._is_due, self._scale = False, 1.0
        self._found: dict[int, list[float]] = {}
        self._pair: Any = None

    def begin_step(self, step: int) -> None:
        """Measure a step, counted from 1, if it is due."""
        self._is_due = step % EVERY_STEPS == 0
        if self._is_due and self._scale_of is not None:
            self._scale = float(_array(self._scale_of))

    def observe(self, own: Sequence[Any], mean: Sequence[Any]) -> None:
        """Square gradients before and after they are averaged, and before they are clipped."""
        if self._is_due:
            self._pair = torch.stack([_square_of(own), _square_of(mean)])

    def end_step(self, step: int) -> None:
        """Keep the squares of a step."""
        if self._is_due:
            self._found[step] = [float(value) / self._scale**2 for value in self._pair]
        self._is_due = False

    def take(self) -> dict[int, list[float]]:
        """The squares by step since they were taken."""
        found, self._found = self._found, {}
        return found


class GraphSquares(HostSquares):
    """The same in a graph of TensorFlow."""

    def __init__(self, optimizer: Any) -> None:
        import tensorflow as tf

        super().__init__(optimizer)
        self._tf = tf
        self._due_in_graph = tf.Variable(tf.constant(False), trainable=False)
        self._pair = tf.Variable(tf.zeros(2), trainable=False)

    def begin_step(self, step: int) -> None:
        before = self._is_due
        super().begin_step(step)
        if self._is_due or before:
            self._due_in_graph.assign(self._is_due)

    def observe(self, own: Sequence[Any], mean: Sequence[Any]) -> None:
        tf = self._tf

        def squares() -> Any:
            return tf.stack([self._square(own), self._square(mean)])

        self._pair.assign(tf.cond(self._due_in_graph, squares, lambda: tf.zeros(2)))

    def end_step(self, step: int) -> None:
        if self._is_due:
            self._found[step] = [float(value) / self._scale**2 for value in self._pair.numpy()]

    def _square(self, gradients: Sequence[Any]) -> Any:
        tf = self._tf
        dense = [tf.cast(tf.convert_to_tensor(each), tf.float32) for each in gradients if each is not None]
        return tf.add_n([tf.reduce_sum(tf.square(each)) for each in dense])


def _square_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]).square().sum()


class KerasLearner:
    """`model` is what is saved; `compiled` has the same layers and is compiled, for `fit` and `evaluate`."""

    reports_phases = runs_ahead = False

    def __init__(self, config: RunConfig, plan: Plan, input_shape: tuple[int, ...], num_classes: int) -> None:
        _seed(config.seed)  # the same first weights on every rank
        shapes = {"input_shape": input_shape, "num_classes": num_classes}
        self.model: keras.Model = parts.call(config.model.locate_in_keras(), "model", config.model.options(), **shapes)
        self.compiled: Any = keras.Model(self.model.inputs, self.model.outputs)
        self.criterion = parts.call(config.loss.locate_in_keras(), "loss", config.loss.options())
        self.metrics = [_METRICS[name](num_classes) for name in config.metrics]
        self.names = ("loss", *config.metrics)
        self.timer: StepTimer = NoTimer()
        self.optimizer = _build_optimizer(config)
        # Compiled for TensorFlow's XLA, a step could not wait for other ranks; JAX has nothing but XLA.
        compiled = keras_backend(config) == "jax"
        self.compiled.compile(self.optimizer, self.criterion, metrics=self.metrics, jit_compile=compiled)
        self.optimizer.build(self.compiled.trainable_variables)
        self.squares = self._make_squares(config)
        self._rate: float | None = None
        self._config, self._plan = config, plan
        self._carried = torch.zeros(2 * len(self.names), dtype=torch.float64)  # totals from a checkpoint

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(int(np.prod(variable.shape)) for variable in self.model.trainable_weights)

    @property
    def gradient_bytes(self) -> int:
        """The bytes that ranks average in a step: float32."""
        return 4 * self.parameters

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        if lr != self._rate:
            self.sync()
            self.optimizer.learning_rate = lr
            self._rate = lr

    def start(self, rank: int, step: int) -> None:
        """Seed every random layer by the seed, its position, the rank and the step, and reset the metrics."""
        states = [v for v in self.compiled.non_trainable_variables if v.name == "seed_generator_state"]
        for place, state in enumerate(states):
            state.assign(np.array([mix(self._config.seed, rank, place) % (1 << 31), step]))
        self._clear_measures()

    def dry_run(self, batch: RankBatch) -> tuple[float, float]:
        """Compute a batch's loss without changing any state: its sum over this rank's samples, and their number."""
        before = [(variable, _array(variable)) for variable in self.compiled.non_trainable_variables]
        inputs, labels = as_arrays(batch.micro_batches[0])
        scores = self.compiled(keras.ops.convert_to_tensor(inputs), training=True)
        loss = float(_array(self.criterion(keras.ops.convert_to_tensor(labels), scores)))
        for variable, value in before:
            variable.assign(value)
        return loss * len(labels), len(labels)

    @property
    def measures(self) -> list[Any]:
        """The running mean of the loss, then of each metric."""
        return [next(metric for metric in self.compiled.metrics if metric.name == "loss"), *self.metrics]

    def totals(self) -> torch.Tensor:
        """The totals of the training steps since they were taken."""
        return self._measured() + self._carried

    def take_totals(self) -> Callable[[], torch.Tensor]:
        """Set the totals to zero; returns a function that gives what they were."""
        found = self.totals()
        self.put_totals([], is_first=False)
        return lambda: found

    def put_totals(self, totals: Sequence[float], is_first: bool) -> None:
        """Restore totals: the given ones on rank 0, zeros on other ranks."""
        self._clear_measures()
        self._carried = torch.tensor(totals, dtype=torch.float64) if is_first else torch.zeros_like(self._carried)

    def take_squares(self) -> dict[int, list[float]]:
        """The squared gradient of this rank's samples and of the whole batch by step, since they were taken."""
        return self.squares.take() if self.squares else {}

    @property
    def biases(self) -> tuple[str, ...]:
        """What in the model biases the gradient noise scale."""
        layers = self.model._flatten_layers()
        return ("batch norm",) if any(isinstance(each, keras.layers.BatchNormalization) for each in layers) else ()

    def _make_squares(self, config: RunConfig) -> HostSquares | None:
        """What measures the gradient noise scale, if the recipe has it measured."""
        if not config.log.noise_scale:
            return None
        squares = (GraphSquares if keras_backend(config) == "tensorflow" else HostSquares)(self.optimizer)
        if config.framework == "keras":
            self.optimizer._distribution.observe = squares.observe
        return squares

    def begin_step(self, step: int) -> None:
        """Prepare for a step, counted from 1."""
        if self.squares:
            if self._config.precision == "fp16" and step % EVERY_STEPS == 0:
                self.sync()  # the scale of the loss is read
            self.squares.begin_step(step)

    def end_step(self, step: int) -> None:
        """Keep what was measured in a step."""
        if self.squares:
            self.squares.end_step(step)

    def evaluate(self, data: Any, group: Group, goes_on: Callable[[], bool]) -> torch.Tensor:
        """The totals of this rank's part of a dataset, while `goes_on` agrees; called right after a log."""
        per_rank_batch = self._config.batch.eval or self._plan.per_rank_batch
        workers, seed = self._config.data.workers, self._config.seed
        batches, count = evaluation_feed(data, group, per_rank_batch, workers, seed)
        self.sync()
        self._clear_measures()
        if count:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # skipped files may leave fewer batches than announced
                self.compiled.evaluate(batches, steps=count, verbose=0, callbacks=[_EndsEarly(goes_on)])
        totals = self._measured()
        self._clear_measures()
        return totals

    def evaluated(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """The trained weights alone."""
        yield "", nullcontext()

    def _measured(self) -> torch.Tensor:
        """The sums of Keras' own means, then their weights."""
        self.sync()
        measures = self.measures
        values = [m.total for m in measures] + [m.count for m in measures]
        return torch.tensor([float(_array(value)) for value in values], dtype=torch.float64)

    def _clear_measures(self) -> None:
        for metric in self.measures:
            metric.reset_state()

    def combine_ranks(self, group: Group) -> None:
        """Average the running statistics of batch norm over ranks."""
        variables = self.model.non_trainable_weights
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
        """The variables that are the same on all ranks: trained weights and optimizer state."""
        self.sync()
        return [*self.model.trainable_weights, *self.optimizer.variables]

    def shape(self) -> dict[str, str]:
        """Position, type and shape of all saved variables, without the names of Keras, which change in a process."""
        return {
            f"{place}.{type(layer).__name__}.{variable.name}": f"{variable.dtype} {list(variable.shape)}"
            for place, layer in enumerate(self.model.layers)
            for variable in layer.weights
        }

    def write(self, folder: Path, group: Group) -> list[Path]:
        """Write the model and the optimizer durably, from rank 0."""
        self.sync()
        if not group.is_first:
            return []
        folder.mkdir()
        files = [folder / MODEL_FILE, folder / OPTIMIZER_FILE]
        with quiet_import():
            self.model.save(files[0])
        values: list[Any] = [_array(variable) for variable in self.optimizer.variables]
        np.savez(files[1], **{f"{place:05d}": value for place, value in enumerate(values)})
        for path in files:
            sync_path(path)
        return files

    def load_weights(self, folder: Path, averages: bool = False) -> None:
        """Read the model alone from a verified checkpoint."""
        self.model.load_weights(folder / MODEL_FILE)

    def start_from(self, init: InitConfig) -> StartingPoint:
        """Begin with the weights of another run of Keras or of a file of Keras."""
        path, names = Path(init.source), list(self.shape())
        if not path.is_file():
            folder = find_folder(init)
            if MODEL_FILE not in verify(folder).files:
                raise ConfigError(
                    f"init.from={init.source} is a run of torch: expected one of Keras or TensorFlow, or a .keras or "
                    ".weights.h5 file."
                )
            path = folder / MODEL_FILE
        before = [_array(variable) for variable in self.model.weights]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what does not fit, which is told below
                self.model.load_weights(path, skip_mismatch=not init.strict)
        except Exception as error:  # Keras raises almost anything where layers differ
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"init.from={init.source} does not fit the model: {reason} Set init.strict=false to begin with what "
                "fits."
            ) from error
        same = [np.array_equal(old, _array(new)) for old, new in zip(before, self.model.weights, strict=True)]
        kept = [name for name, is_same in zip(names, same, strict=True) if is_same]
        return StartingPoint(str(path), [name for name in names if name not in kept], [], kept, {})

    def load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Read a verified checkpoint into the model and the optimizer."""
        self.model.load_weights(folder / MODEL_FILE)
        variables = self.optimizer.variables
        with np.load(folder / OPTIMIZER_FILE) as arrays:
            found = [arrays[name] for name in sorted(arrays.files)]
        if [value.shape for value in found] != [tuple(variable.shape) for variable in variables]:
            raise CheckpointError(
                f"checkpoint {folder} is of another optimizer: {OPTIMIZER_FILE} holds {len(found)} arrays, and the "
                f"optimizer of this run has {len(variables)}, or others. Resume without overrides of optim.* and "
                "precision."
            )
        for variable, value in zip(variables, found, strict=True):
            variable.assign(value)

    def progress(self) -> dict[str, Any]:
        """Empty: all of the state is in the files."""
        return {}

    def sync(self) -> None:
        """On JAX, put the values that `fit` passes from step to step back into the variables."""
        getattr(self.compiled, "jax_state_sync", lambda: None)()


def _seed(seed: int) -> None:
    """Seed the generators from which Keras draws its seeds; Keras' own function imports TensorFlow on any backend."""
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

    return DistributedOptimizer(optimizer)  # outermost: gradients are checked for infinities after they are averaged


def _array(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))
