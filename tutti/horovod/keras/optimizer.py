"""Optimizers of Keras whose gradients are reduced over ranks, and loading of saved models with such an optimizer."""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from tutti.errors import ConfigError
from tutti.horovod.engine.messages import AVERAGE, SUM
from tutti.horovod.gradients import Compression, ReductionOptions, identity, variables_of
from tutti.horovod.keras import patches
from tutti.horovod.keras.backends import Backend, backend_of, is_legacy

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class DistributionOptions(ReductionOptions):
    """How an optimizer of Keras reduces gradients, and after how many backward passes."""

    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False

    def __post_init__(self) -> None:
        if self.op not in (AVERAGE, SUM):
            raise ValueError(f"op={self.op} is not supported with Keras: expected hvd.Average or hvd.Sum.")
        if self.backward_passes_per_step <= 0:
            raise ValueError(f"backward_passes_per_step={self.backward_passes_per_step} must be > 0")
        super().__post_init__()

    @property
    def is_active(self) -> bool:
        """Return whether there are other ranks to reduce with, or may be after a reset of an elastic job."""
        alone = self.process_set.size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        return self.process_set.included() and not alone

    @property
    def local_factor(self) -> float:
        """Return the factor of gradients of variables that are local to this rank."""
        return 1.0 / self.process_set.size() if self.scale_local_gradients and self.is_active else 1.0


class Distribution:
    """The state of one distributed optimizer; `counter` is the number of backward passes since the last step."""

    def __init__(self, options: DistributionOptions, backend: Backend) -> None:
        self.options, self.backend = options, backend
        self.local_variables: set[int] = set()
        self.counter: Any = 0
        self.sums: list[Any] = []  # of the gradients of these passes
        self.buffers: list[Any] = []  # in which they are sent
        self.is_reduced = False  # while the wrapped class works on gradients that are already reduced
        # Called with gradients of this rank and with the same reduced: tensors of TensorFlow or, on jax too, of torch.
        self.observe: Callable[[Sequence[Any], Sequence[Any]], None] | None = None

    @cached_property
    def name(self) -> str:
        """Return a name, numbered at the first reduction: an optimizer that only one rank creates must not count."""
        return f"DistributedOptimizer_{next(_numbers)}"

    def exchange(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return whether a step is due, and its gradients; every rank of the process set must enter."""
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        are_local = [identity(variables[place]) in self.local_variables for place in places]
        due, found = self.backend.exchange(self, [gradients[place] for place in places], are_local)
        reduced: list[Any] = [None] * len(gradients)
        for place, gradient in zip(places, found, strict=True):
            reduced[place] = gradient
        return due, reduced

    @property
    def accumulates(self) -> bool:
        return self.options.backward_passes_per_step > 1


def distribute(optimizer: Any, options: DistributionOptions, name: str | None = None) -> Any:
    """Return a distributed optimizer of the same class with the same settings and state."""
    if patches.is_distributed(optimizer):
        raise ValueError(f"{type(optimizer).__name__} is distributed already: expected the optimizer it was made from.")
    if is_legacy(optimizer):
        return _distribute_keras_2(optimizer, options, name)
    if not hasattr(optimizer, "stateless_apply"):
        raise ValueError(
            f"optimizer={optimizer!r}: expected an optimizer of Keras. Write for example keras.optimizers.Adam(0.001)."
        )
    if options.backward_passes_per_step > 1 and _inner(optimizer).gradient_accumulation_steps:
        raise ValueError(
            f"backward_passes_per_step={options.backward_passes_per_step} with gradient_accumulation_steps="
            f"{_inner(optimizer).gradient_accumulation_steps}: both add up gradients. Leave one of them out."
        )
    patches.apply()
    kind = type(optimizer)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_options": options}
    made = _remade(optimizer, type(kind.__name__, (_DistributedKeras3Optimizer, kind), own), name)
    if optimizer.built and optimizer._trainable_variables:
        made.build(optimizer._trainable_variables)
        for variable, value in zip(made.variables, optimizer.variables, strict=True):
            variable.assign(value)
    return made


class _DistributedKerasOptimizer:
    """The base class that precedes the class of an optimizer, for all versions of Keras."""

    _options: DistributionOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._distribution = Distribution(self._options, backend_of(self))

    @property
    def _agg_helper(self) -> Distribution:
        return self._distribution

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable local to this rank."""
        self._distribution.local_variables.add(identity(var))


class _DistributedKeras3Optimizer(_DistributedKerasOptimizer):
    """The base class that precedes the class of an optimizer of Keras 3."""

    _trainable_variables: list[Any]
    built: bool
    build: Any

    @property
    def variables(self) -> patches.CallableList:
        """Return the optimizer's variables, as an attribute and as a call."""
        return patches.CallableList(super().variables)  # pyright: ignore[reportAttributeAccessIssue]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients, and apply them with the wrapped class if a step is due."""
        step, own = super().apply, self._distribution  # pyright: ignore[reportAttributeAccessIssue]
        if own.is_reduced or not len(grads):
            step(grads, trainable_variables)
            return
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:  # a step inside a condition must not create variables
            self.build(variables)
        due, reduced = own.exchange(list(grads), variables)
        own.backend.choose(
            due,
            lambda: self._apply_reduced(step, reduced, trainable_variables),
            lambda: _inner(self)._iterations.assign_add(1),
        )

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Do the same with variables as values, as in a compiled step on jax."""
        step, own = super().stateless_apply, self._distribution  # pyright: ignore[reportAttributeAccessIssue]
        due, reduced = own.exchange(list(grads), self._trainable_variables)
        iterations = _inner(self)._iterations
        pairs = zip(self.variables, optimizer_variables, strict=True)
        skipped = [value + 1 if variable is iterations else value for variable, value in pairs]
        return own.backend.choose(
            due,
            lambda: self._apply_reduced(step, optimizer_variables, reduced, trainable_variables),
            lambda: (list(trainable_variables), skipped),
        )

    def _apply_reduced(self, step: Any, *arguments: Any) -> Any:
        self._distribution.is_reduced = True
        try:
            return step(*arguments)
        finally:
            self._distribution.is_reduced = False


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that makes the steps: the inner one of a LossScaleOptimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _remade(optimizer: Any, kind: Any, name: str | None) -> Any:
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return kind.from_config(config, custom_objects={type(inner).__name__: type(inner)})
    if not isinstance(config.get("learning_rate"), float):  # a schedule or a function: keep the object
        config["learning_rate"] = optimizer._learning_rate
    made = kind.from_config(config)
    for key, value in vars(optimizer).items():
        if key.startswith("_exclude_from_weight_decay"):
            setattr(made, key, value)
    return made


def _distribute_keras_2(optimizer: Any, options: DistributionOptions, name: str | None = None) -> Any:
    """Return a distributed optimizer of the same class with the same settings and state."""
    kind = type(optimizer)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_options": options}
    base = _DistributedLegacyOptimizer if hasattr(optimizer, "_create_all_weights") else _DistributedKeras2Optimizer
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    wrapped: Any = type(kind.__name__, (base, kind), own)
    made = wrapped.from_config(config)
    # The optimizer does not know the variables it was built for: its state is assigned when it is built again.
    made._inherited = [variable.numpy() for variable in variables_of(optimizer)]
    return made


class _DistributedKeras2Optimizer(_DistributedKerasOptimizer):
    """The base class that precedes the class of an optimizer of Keras 2.11 or later."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inherited: list[Any] = []

    def build(self, var_list: Any) -> Any:
        """Create the state, and assign the state of the original optimizer."""
        result = super().build(var_list)  # pyright: ignore[reportAttributeAccessIssue]
        self._inherit()
        return result

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of gradients, reduced over ranks, and variables."""
        return self._reduced(super().compute_gradients(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        return self.compute_gradients(loss, var_list, tape)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients with the wrapped class, if a step is due."""
        step, own, pairs = super().apply_gradients, self._distribution, list(grads_and_vars)  # pyright: ignore[reportAttributeAccessIssue]
        if not own.accumulates or not own.sums:
            return step(pairs, *args, **kwargs)
        iterations = self.iterations  # pyright: ignore[reportAttributeAccessIssue]
        return own.backend.choose(
            own.counter.read_value() == 0, lambda: step(pairs, *args, **kwargs), lambda: iterations.assign_add(1)
        )

    def _inherit(self) -> None:
        values, self._inherited = self._inherited, []
        variables = variables_of(self)
        if len(values) == len(variables):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _reduced(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        pairs = list(pairs)
        variables = [variable for _, variable in pairs]
        _, reduced = self._distribution.exchange([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))


class _DistributedLegacyOptimizer(_DistributedKeras2Optimizer):
    """The base class that precedes the class of an optimizer of `tf_keras.optimizers.legacy`."""

    def _create_all_weights(self, var_list: Any) -> None:
        super()._create_all_weights(var_list)  # pyright: ignore[reportAttributeAccessIssue]
        self._inherit()

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        computed = super(_DistributedKeras2Optimizer, self)._compute_gradients(loss, var_list, grad_loss, tape)  # pyright: ignore[reportAttributeAccessIssue]
        return self._reduced(computed)

    def get_gradients(self, loss: Any, params: Any) -> Any:
        """Return gradients reduced over ranks, in a graph of TensorFlow 1."""
        own = super().get_gradients(loss, params)  # pyright: ignore[reportAttributeAccessIssue]
        return [gradient for gradient, _ in self._reduced(list(zip(own, params, strict=True)))]


def load_model_function(find_keras: Callable[[], ModuleType]):  # the type that is returned is inferred
    """Return the function `load_model` of a namespace, for the Keras that a function finds."""

    def load_model(
        filepath: Any,
        custom_optimizers: Any = None,
        custom_objects: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        legacy_opts: bool = False,
    ) -> Any:
        """Load a saved model with a distributed optimizer that has the saved state."""
        own = {kind.__name__: kind for kind in custom_optimizers or []} | (custom_objects or {})
        model: Any = find_keras().models.load_model(filepath, custom_objects=own)
        return _with_distributed_optimizer(model, filepath, compression)

    return load_model


def _with_distributed_optimizer(model: Any, filepath: Any, compression: Any) -> Any:
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            f"{filepath} holds a model without an optimizer: expected one that was compiled before it was saved. "
            "Load it with keras.models.load_model, and compile it with hvd.DistributedOptimizer(...)."
        )
    optimizer = distribute(model.optimizer, DistributionOptions(compression=compression))
    if not is_legacy(optimizer) and str(filepath).endswith((".h5", ".hdf5")):
        _read_state(optimizer, model, filepath)
    elif is_legacy(optimizer):
        build = optimizer._create_all_weights if hasattr(optimizer, "_create_all_weights") else optimizer.build
        build(model.trainable_variables)
    model.optimizer = optimizer
    if hasattr(model, "_compile_config"):
        model._compile_config.config["optimizer"] = optimizer
    return model


def _read_state(optimizer: Any, model: Any, filepath: Any) -> None:
    """Read the optimizer's state from a file in the format of Keras 2, which Keras 3 does not do for some models."""
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    optimizer.build(model.trainable_variables)
    with h5py.File(filepath, "r") as file:
        values = load_optimizer_weights_from_hdf5_group(file) if "optimizer_weights" in file else []
        if len(values) == len(optimizer.variables):
            optimizer.set_weights(values)
