"""What a distributed optimizer knows about ranks: how gradients are reduced, and those that wait for more passes."""

from typing import Any

from tutti.horovod.keras import legacy, patches
from tutti.horovod.keras.backends import backend_of, is_legacy
from tutti.horovod.keras.distribution import Distribution, Options
from tutti.horovod.variables import identity


def distribute(optimizer: Any, options: Options, name: str | None = None) -> Any:
    """An optimizer of the same class, with the same settings and state, that is distributed."""
    if isinstance(optimizer, Distributed | legacy.Distributed):
        raise ValueError(f"{type(optimizer).__name__} is distributed already: expected the optimizer it was made from.")
    if is_legacy(optimizer):
        return legacy.distribute(optimizer, options, name)
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
    made = _remade(optimizer, type(kind.__name__, (Distributed, kind), own), name)
    if optimizer.built and optimizer._trainable_variables:
        made.build(optimizer._trainable_variables)
        for variable, value in zip(made.variables, optimizer.variables, strict=True):
            variable.assign(value)
    return made


class CallableList(list):
    """A list that old programs call."""

    def __call__(self) -> "CallableList":
        return self


class Distributed:
    """What is put in front of an optimizer's own class."""

    _options: Options
    _trainable_variables: list[Any]
    built: bool
    build: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._distribution = Distribution(self._options, backend_of(self))

    @property
    def _agg_helper(self) -> Distribution:
        return self._distribution

    @property
    def variables(self) -> CallableList:
        """The optimizer's variables, as an attribute and as a call."""
        return CallableList(super().variables)  # pyright: ignore[reportAttributeAccessIssue]

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._distribution.local_variables.add(identity(var))

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients, and let the wrapped class make its step if one is due."""
        step, own = super().apply, self._distribution  # pyright: ignore[reportAttributeAccessIssue]
        if own.passes_on or not len(grads):
            step(grads, trainable_variables)
            return
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:  # here, since a step that may be left out must not make variables
            self.build(variables)
        due, reduced = own.exchange(list(grads), variables)
        own.backend.choose(
            due,
            lambda: self._passing_on(step, reduced, trainable_variables),
            lambda: _inner(self)._iterations.assign_add(1),
        )

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """The same where variables are values, as in a compiled step on jax."""
        step, own = super().stateless_apply, self._distribution  # pyright: ignore[reportAttributeAccessIssue]
        due, reduced = own.exchange(list(grads), self._trainable_variables)
        iterations = _inner(self)._iterations
        pairs = zip(self.variables, optimizer_variables, strict=True)
        skipped = [value + 1 if variable is iterations else value for variable, value in pairs]
        return own.backend.choose(
            due,
            lambda: self._passing_on(step, optimizer_variables, reduced, trainable_variables),
            lambda: (list(trainable_variables), skipped),
        )

    def _passing_on(self, step: Any, *arguments: Any) -> Any:
        self._distribution.passes_on = True
        try:
            return step(*arguments)
        finally:
            self._distribution.passes_on = False


def _inner(optimizer: Any) -> Any:
    """The optimizer that makes the steps, which one for scaled losses has inside."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _remade(optimizer: Any, kind: Any, name: str | None) -> Any:
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return kind.from_config(config, custom_objects={type(inner).__name__: type(inner)})
    if not isinstance(config.get("learning_rate"), float):  # a schedule or a function: itself, not a description of it
        config["learning_rate"] = optimizer._learning_rate
    made = kind.from_config(config)
    for key, value in vars(optimizer).items():
        if key.startswith("_exclude_from_weight_decay"):
            setattr(made, key, value)
    return made
