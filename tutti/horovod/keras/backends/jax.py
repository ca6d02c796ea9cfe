"""Keras on jax: a compiled step calls back into Python once, with all gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from jax.core import Tracer  # pyright: ignore[reportMissingImports]
from jax.experimental import io_callback  # pyright: ignore[reportMissingImports]

from tutti.horovod.basics import ProcessSet
from tutti.horovod.keras.backends import torch as host

Arrays = list[jax.Array]


def exchange(distribution: Any, gradients: Arrays, are_local: list[bool]) -> tuple[Any, Arrays]:
    """Return whether a step is due, and its gradients: reduced, or scaled where a variable is local to this rank."""
    if not distribution.accumulates and not distribution.options.is_active:
        return True, gradients

    def on_the_host(*arrays: Any) -> tuple[Any, list[Any]]:
        due, reduced = host.exchange(distribution, [torch.from_dlpack(array) for array in arrays], are_local)
        return np.bool_(due), [_array(each, given) for each, given in zip(reduced, arrays, strict=True)]

    shapes = [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in gradients]
    flag = jax.ShapeDtypeStruct((), np.bool_)
    due, reduced = io_callback(on_the_host, (flag, shapes), *gradients, ordered=True)
    return due if distribution.accumulates else True, reduced


def choose(due: Any, step: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Call one of two functions; outside a compiled function they may also assign to variables."""
    if isinstance(due, Tracer):
        return jax.lax.cond(due, step, skip)
    return step() if due else skip()


def agree(flag: Any, process_set: ProcessSet) -> jax.Array:
    """Return whether a flag is true on all ranks."""

    def on_the_host(own: Any) -> Any:
        return np.bool_(host.agree(bool(own), process_set).item())

    return io_callback(on_the_host, jax.ShapeDtypeStruct((), np.bool_), flag, ordered=True)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Broadcast one rank's values to the variables of all ranks."""
    values = [_copied(variable.value) for variable in variables]
    host.broadcast_parameters([(f"variable_{place}", value) for place, value in enumerate(values)], root_rank)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(_array(value, variable.value))


def call(collective: str, value: Any, **options: Any) -> jax.Array:
    """Apply a collective to a value that jax can convert to an array."""
    array = jax.numpy.asarray(value)
    return jax.numpy.asarray(_array(host.call(collective, _copied(array), **options), array))


def _copied(array: Any) -> torch.Tensor:
    """Copy an array: the memory of jax must not change."""
    own = np.array(array)
    if own.dtype.name == "bfloat16":  # a dtype that NumPy does not have itself
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def _array(tensor: torch.Tensor, like: Any) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(like.dtype)
    return tensor.numpy()
