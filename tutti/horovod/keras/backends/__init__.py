"""The frameworks that Keras computes with, one module for each with the same functions, and collectives on values."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from tutti.errors import ConfigError
from tutti.horovod.basics import ProcessSet
from tutti.horovod.engine.messages import AVERAGE, SUM
from tutti.horovod.gradients import Compression


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


NEEDS_KERAS = "{} needs Keras, which is not installed. Install it with: pip install 'tutti-train[keras]'"


def keras_alone() -> ModuleType:
    """What `import keras` gives."""
    try:
        import keras
    except ImportError as error:
        raise ImportError(NEEDS_KERAS.format("tutti.horovod.keras (horovod.keras)")) from error
    return keras


def keras_of_tensorflow() -> ModuleType:
    """What `tf.keras` is: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS says so."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        import tf_keras  # pyright: ignore[reportMissingImports]

        return tf_keras
    return keras_alone()


def reduce_value(
    value: Any,
    name: str | None,
    average: bool | None,
    scales: tuple[float, float],
    op: int | None,
    compression: Any = Compression.none,
) -> Any:
    """A value reduced over ranks, by an operation or by the older word for it."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = op if op is not None else SUM if average is False else AVERAGE
    options = {"name": name, "op": chosen, "prescale_factor": scales[0], "postscale_factor": scales[1]}
    return current().call("allreduce", value, compression=compression, **options)


def allgather(value: Any, name: str | None = None) -> Any:
    """The rows of all ranks after each other."""
    return current().call("allgather", value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """A rank's value on all ranks."""
    return current().call("broadcast", value, root_rank=root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = AVERAGE) -> Any:
    """A value reduced over ranks, some of the rows on each."""
    return current().call("reducescatter", value, name=name, op=op)


def broadcast_global_variables(root_rank: int) -> None:
    """What TensorFlow 1 had: variables that everybody can see."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution: there are no global variables. "
        "Give hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit."
    )
