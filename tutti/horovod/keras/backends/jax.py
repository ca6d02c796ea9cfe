"""Keras on jax: a compiled step calls back into Python, once for all gradients."""

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
    """Whether a step is due, and its gradients: those of this rank's own variables scaled, all others reduced."""
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
    """Do the one or the other; outside a compiled function they may also assign to variables."""
    if isinstance(due, Tracer):
        return jax.lax.cond(due, step, skip)
    return step() if due else skip()


def agree(flag: Any, process_set: ProcessSet) -> jax.Array:
    """Whether it is true on all ranks."""

    def on_the_host(own: Any) -> Any:
        return np.bool_(host.agree(bool(own), process_set).item())

    return io_callback(on_the_host, jax.ShapeDtypeStruct((), np.bool_), flag, ordered=True)


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """One rank's values into the variables of all."""
    values = [_copied(variable.value) for variable in variables]
    host.broadcast_parameters([(f"variable_{place}", value) for place, value in enumerate(values)], root_rank)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(_array(value, variable.value))


def call(collective: str, value: Any, **options: Any) -> jax.Array:
    """A collective on a value that may be anything jax makes an array of."""
    array = jax.numpy.asarray(value)
    return jax.numpy.asarray(_array(host.call(collective, _copied(array), **options), array))


def _copied(array: Any) -> torch.Tensor:
    """In memory of its own: what jax lends must not change."""
    own = np.array(array)
    if own.dtype.name == "bfloat16":  # which NumPy knows by another package
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def _array(tensor: torch.Tensor, like: Any) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(like.dtype)
    return tensor.numpy()
