"""The backends of Keras, one module for each with the same functions, and collectives on values."""

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
    """The functions of each module."""

    def exchange(self, distribution: Any, gradients: list[Any], are_local: list[bool]) -> tuple[Any, list[Any]]:
        """Return whether a step is due, and its gradients: reduced, or scaled for local variables."""
        ...

    def choose(self, due: Any, step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
        """Call one of two functions."""
        ...

    def agree(self, flag: Any, process_set: ProcessSet) -> Any:
        """Return whether a flag is true on all ranks."""
        ...

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int) -> None:
        """Broadcast one rank's values to the variables of all ranks."""
        ...

    def call(self, collective: str, value: Any, **options: Any) -> Any:
        """Apply a collective to a value that the framework can convert to a tensor."""
        ...


def backend_of(thing: Any) -> Backend:
    """Return the module for an optimizer, a model or a variable."""
    if is_legacy(thing):
        return _module("tensorflow")
    return current()


def current() -> Backend:
    """Return the module of the backend of Keras 3."""
    import keras

    return _module(keras.backend.backend())


def is_legacy(thing: Any) -> bool:
    """Return whether an object belongs to Keras 2, which the package tf_keras provides."""
    modules = (kind.__module__ for kind in type(thing).__mro__)
    return any(name.startswith(("tf_keras.", "tensorflow.python.keras.")) for name in modules)


def _module(name: str) -> Backend:
    if name not in ("tensorflow", "torch", "jax"):
        raise ConfigError(
            f"The backend of Keras is {name!r}: expected tensorflow, torch or jax. "
            "Set KERAS_BACKEND to one of them before Keras is imported."
        )
    return import_module(f"tutti.horovod.keras.backends.{name}")  # pyright: ignore[reportReturnType]


NEEDS_KERAS = "{} needs Keras, which is not installed. Install it with: pip install 'tutti-train[keras]'"


def keras_alone() -> ModuleType:
    """Return the package keras, or raise ImportError with the command that installs it."""
    try:
        import keras
    except ImportError as error:
        raise ImportError(NEEDS_KERAS.format("tutti.horovod.keras (horovod.keras)")) from error
    return keras


def keras_of_tensorflow() -> ModuleType:
    """Return what `tf.keras` is: Keras 3, or tf_keras if TF_USE_LEGACY_KERAS is set."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        import tf_keras  # pyright: ignore[reportMissingImports]

        return tf_keras
    return keras_alone()


def allreduce_function(default_average: bool | None):  # the type that is returned is inferred: Horovod's signature
    """Return the function `allreduce` of a namespace; the two of Keras differ in a default."""

    def allreduce(
        value: Any,
        name: str | None = None,
        average: bool | None = default_average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: int | None = None,
        compression: Any = Compression.none,
    ) -> Any:
        """Reduce a value over ranks; `average` is the deprecated way to select the reduction."""
        if op is not None and average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        chosen = op if op is not None else SUM if average is False else AVERAGE
        scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return current().call("allreduce", value, name=name, op=chosen, compression=compression, **scales)

    return allreduce


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the rows of all ranks."""
    return current().call("allgather", value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Broadcast a rank's value to all ranks."""
    return current().call("broadcast", value, root_rank=root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = AVERAGE) -> Any:
    """Reduce over ranks, and return this rank's rows."""
    return current().call("reducescatter", value, name=name, op=op)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: global variables exist in TensorFlow 1 only."""
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution: there are no global variables. "
        "Give hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit."
    )
