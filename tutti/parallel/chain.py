"""Models that are chains of modules: their names and times, and where they are cut into parts of about equal time."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tutti.config.layout import chunks_per_rank
from tutti.config.schema import ParallelConfig
from tutti.errors import ConfigError

_ROUNDS = 2  # of which the faster one counts: the first also allocates memory and selects kernels
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """What one module of a chain costs, and what it gives to the next for a micro-batch."""

    name: str
    seconds: float  # forward and backward
    parameters: int  # to train
    outputs: list[tuple[str, list[int]]] = field(default_factory=list)  # type and shape of each tensor


def name_chain(model: nn.Module) -> list[str]:
    """The names of the modules that a model applies in order: its `stages()`, or the children of a sequence."""
    named: Callable[[], Sequence[str]] | None = getattr(model, "stages", None)
    if named is not None:
        return list(named())
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    raise ConfigError(
        f"parallel.stages with {type(model).__name__}: expected a model that names its parts. Give it a method "
        "stages() with the names of its modules in order, each from one tensor to one tensor, or use an nn.Sequential. "
        "With skip connections it also needs run_stage(name, *tensors), which gives all tensors that later ones take."
    )


def run_layer(model: nn.Module, name: str, values: Tensors) -> Any:
    """Apply one module of a chain to what the one before it gives."""
    if (run := getattr(model, "run_stage", None)) is not None:
        return run(name, *values)
    return (model.get_submodule(name)(*values),)


def check_chain(model: nn.Module, config: ParallelConfig, stages: int) -> None:
    """Refuse a model that cannot be cut into so many stages."""
    names = name_chain(model)
    kind = type(model).__name__
    if config.schedule == "zero_bubble" and hasattr(model, "run_stage"):
        raise ConfigError(
            f"parallel.schedule=zero_bubble with {kind}, whose stages pass several tensors: expected one, since torch "
            "splits the backward pass of one alone. Set parallel.schedule=1f1b or interleaved."
        )
    for name in names:
        try:
            model.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                f"{kind}.stages() names {name!r}: expected the name of a module of {kind}. {error}."
            ) from error
    values = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    places: dict[int, tuple[str, str]] = {}
    for full, value in values:
        place = next((name for name in names if full.startswith(f"{name}.")), None)
        if place is None:
            raise ConfigError(
                f"parallel.stages with {kind}: {full} is in none of the modules that stages() names, and would be on "
                "no rank. Put it into one of them, or name its module."
            )
        other, there = places.setdefault(id(value), (full, place))
        if there != place:
            raise ConfigError(
                f"parallel.stages with {kind}: {full} and {other} are one parameter, of {there} and {place}. "
                "Use two parameters, or set parallel.stages=1."
            )
    parts = stages * chunks_per_rank(config)
    layers = sum(_trained(model.get_submodule(name)) > 0 for name in names)
    if layers < parts:
        most = layers // chunks_per_rank(config)
        chunks = "" if parts == stages else f", {parts} parts with parallel.schedule={config.schedule}"
        fix = f"Set parallel.stages={most} or less" if most > 1 else "Set parallel.stages=1"
        raise ConfigError(
            f"parallel.stages={stages}{chunks}: {kind} has {layers} modules with weights to train. {fix}, or let its "
            "stages() name smaller modules."
        )


def _trained(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad)


def measure_chain(
    model: nn.Module, inputs: Any, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
) -> list[Layer]:
    """The time of each module of a chain for a micro-batch, and its output; the model is left as it was."""
    names, kind = name_chain(model), type(model).__name__
    if not isinstance(inputs, torch.Tensor):
        raise ConfigError(f"parallel.stages with inputs of type {type(inputs).__name__}: expected one tensor a batch.")
    layers, values = [], (inputs,)
    with _unchanged(model):
        for name in names:
            seconds, values = _measure(functools.partial(run_layer, model, name), values, device, autocast)
            if not all(isinstance(each, torch.Tensor) for each in values):
                given = next(type(each).__name__ for each in values if not isinstance(each, torch.Tensor))
                raise ConfigError(f"{kind}.stages() names {name}, which gives a {given}: expected one tensor.")
            outputs = [(str(each.dtype), list(each.shape)) for each in values]
            layers.append(Layer(name, seconds, _trained(model.get_submodule(name)), outputs))
        _check_same_output(model, names, inputs, autocast)
    return layers


def _measure(
    run: Callable[[Tensors], Any], values: Tensors, device: torch.device, autocast: Any
) -> tuple[float, Tensors]:
    seconds, outputs = math.inf, values
    for _ in range(_ROUNDS):
        given = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in values)
        began = time.perf_counter()
        with autocast():
            outputs = run(given)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            return seconds, outputs
        if trained := [each.float().sum() for each in outputs if each.grad_fn is not None]:
            torch.stack(trained).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - began)
        outputs = tuple(each.detach() for each in outputs)
    return seconds, outputs


@torch.no_grad()
def _check_same_output(model: nn.Module, names: Sequence[str], inputs: torch.Tensor, autocast: Any) -> None:
    model.eval()
    with autocast():
        whole, values = model(inputs), (inputs,)
        for name in names:
            values = run_layer(model, name, values)
    last = values[-1]
    if len(values) > 1 or not isinstance(whole, torch.Tensor) or whole.shape != last.shape or not _close(whole, last):
        raise ConfigError(
            f"the modules of {type(model).__name__}.stages(), one after another, do not give what the model gives. "
            "Name all that it applies, in order; what it does between them belongs into a module."
        )


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first.float(), second.float(), rtol=1e-2 if first.dtype.itemsize == 2 else 1e-4, atol=1e-5)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores the buffers, the gradients and the mode of a model."""
    was_training, buffers = model.training, [buffer.clone() for buffer in model.buffers()]
    model.train()
    try:
        yield
    finally:
        model.train(was_training)
        model.zero_grad()
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)


def cut(layers: Sequence[Layer], parts: int) -> list[range]:
    """Consecutive layers in so many parts whose slowest is as fast as possible; each has weights to train."""
    ends = [0, *itertools.accumulate(layer.seconds for layer in layers)]
    weights = [0, *itertools.accumulate(layer.parameters for layer in layers)]
    count = len(layers)
    best = {(0, 0): (0.0, 0)}  # (parts, layers in them): the time of the slowest, and where the last begins
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            found = [
                (max(best[part - 1, start][0], ends[end] - ends[start]), start)
                for start in range(part - 1, end)
                if (part - 1, start) in best and weights[end] > weights[start]
            ]
            if found:
                best[part, end] = min(found)
    cuts, end = [], count
    for part in range(parts, 0, -1):
        start = best[part, end][1]
        cuts.append(range(start, end))
        end = start
    return cuts[::-1]
