"""One module for each framework that Keras computes with, with the same functions in the same order."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from tutti.errors import ConfigError
from tutti.horovod.process_sets import ProcessSet


class Backend(Protocol):
    """What each module has."""

    def exchange(self, distribution: Any, gradients: list[Any], are_local: list[bool]) -> tuple[Any, list[Any]]:
        """Whether a step is due, and its gradients: those of this rank's own variables scaled, all others reduced."""
        ...

    def choose(self, due: Any, step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Do the one or the other."""
        ...

    def agree(self, flag: Any, process_set: ProcessSet) -> Any:
        """Whether it is true on all ranks."""
        ...

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int) -> None:
        """One rank's values into the variables of all."""
        ...

    def call(self, collective: str, value: Any, **options: Any) -> Any:
        """A collective on a value that may be anything the framework makes a tensor of."""
        ...


def backend_of(thing: Any) -> Backend:
    """The module for an optimizer, a model or a variable, by what it is made of."""
    if is_legacy(thing):
        return _module("tensorflow")
    return current()


def current() -> Backend:
    """The module for what Keras 3 computes with."""
    import keras

    return _module(keras.backend.backend())


def is_legacy(thing: Any) -> bool:
    """Whether something is of Keras 2, as the package tf_keras has it."""
    modules = (kind.__module__ for kind in type(thing).__mro__)
    return any(name.startswith(("tf_keras.", "tensorflow.python.keras.")) for name in modules)


def _module(name: str) -> Backend:
    if name not in ("tensorflow", "torch", "jax"):
        raise ConfigError(
            f"Keras computes with {name!r} here: expected tensorflow, torch or jax. "
            "Set KERAS_BACKEND to one of them before Keras is imported."
        )
    return import_module(f"tutti.horovod.keras.backends.{name}")  # pyright: ignore[reportReturnType]
