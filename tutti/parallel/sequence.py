"""Sequences split over ranks: each computes on its places, and attention exchanges places for heads by all-to-all.

Between attention layers a rank has some places of all heads, within one all places of some heads. Gradients are those
of the sum of the ranks' losses, as where samples are split in space: their mean over ranks is that of the mean loss.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.errors import ConfigError
from tutti.parallel.space.halo import SpaceGrid, gather_parts, group_of, register, through_host

_PLACES = 1  # the dimension of what modules give to each other: (samples, places, width)
_HEADS = 1  # the dimension of queries, keys and values: (samples, heads, places, width)


@torch.library.custom_op("tutti::exchange", mutates_args=())
def exchange(tensor: torch.Tensor, cut: int, joined: int, grid: int) -> torch.Tensor:
    """Send each rank its part along the dimension `cut`, and join what comes from all along the dimension `joined`."""
    group, ranks = group_of(grid)
    sent = torch.stack(tensor.chunk(ranks, cut))
    if through_host(tensor, group):
        sent = sent.cpu()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.to(tensor.device).unbind(), joined)


@exchange.register_fake
def _(tensor: torch.Tensor, cut: int, joined: int, grid: int) -> torch.Tensor:
    shape, ranks = list(tensor.shape), group_of(grid)[1]
    shape[cut] //= ranks
    shape[joined] *= ranks
    return tensor.new_empty(shape)


def _keep_dims(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.place = inputs[1:]


def _exchange_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    cut, joined, grid = ctx.place
    return torch.ops.tutti.exchange(gradient, joined, cut, grid), None, None, None


exchange.register_autograd(_exchange_gradient, setup_context=_keep_dims)


class SequenceParts:
    """The places of sequences that this rank has: as many on each, in the order of ranks."""

    def __init__(self, parts: int, place: int, group: dist.ProcessGroup, ranks: list[int]) -> None:
        self.parts, self.place = parts, place
        self._grid = register(SpaceGrid((parts,), (place,), group, tuple(ranks)))

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's places of whole sequences."""
        return whole.chunk(self.parts, _PLACES)[self.place]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Whole sequences, of the places of all ranks; every rank that shares them enters."""
        return gather_parts(part, [_PLACES], self._grid)

    def by_heads(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All places of this rank's heads, from its places of all heads."""
        together = torch.stack((queries, keys, values))  # one message instead of three
        return exchange(together, _HEADS + 1, _HEADS + 2, self._grid).unbind()

    def by_places(self, mixed: torch.Tensor) -> torch.Tensor:
        """This rank's places of all heads, from all places of its heads."""
        return exchange(mixed, _HEADS + 1, _HEADS, self._grid)


# What a model's sequence_plan() may say of a module, and what is put around its forward pass.
KINDS: dict[str, Callable[[SequenceParts, Callable[..., Any]], Callable[..., Any]]] = {
    "cut": lambda parts, forward: lambda *inputs: parts.cut(forward(*inputs)),  # it gives whole sequences
    "heads": lambda parts, forward: lambda *inputs: parts.by_places(forward(*parts.by_heads(*inputs))),
    "whole": lambda parts, forward: lambda inputs: forward(parts.gather(inputs)),  # it takes whole sequences
}


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """The modules of a model before, between and after which sequences are split."""
    named: Callable[[], Mapping[str, str]] | None = getattr(model, "sequence_plan", None)
    if named is None:
        raise ConfigError(
            f"parallel.sequence with {type(model).__name__}: expected a model with the method sequence_plan(), which "
            "names the module after which sequences are cut, and those in which heads attend to all places, as "
            "{'embedding': 'cut', 'attention.mix': 'heads'}. Choose a transformer, add the method, or leave "
            "parallel.sequence out."
        )
    plan = named()
    for name, how in plan.items():
        if how not in KINDS:
            raise ConfigError(
                f"{type(model).__name__}.sequence_plan() has {how!r} for {name}: expected one of "
                f"{', '.join(map(repr, KINDS))}."
            )
        try:
            model.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                f"{type(model).__name__}.sequence_plan() names {name!r}: expected the name of a module. {error}."
            ) from error
    return plan


def gives_parts(model: nn.Module) -> bool:
    """Returns whether the outputs of a model are those of a rank's places."""
    return "whole" not in plan_of(model).values()


def check_sequence(model: nn.Module, parts: int, run: Callable[[], Any]) -> None:
    """Refuse sequences and heads that do not split into so many parts; `run` is a forward pass of the whole model."""
    found: list[tuple[str, int]] = []

    def note(_: nn.Module, inputs: tuple[Any, ...], outputs: torch.Tensor) -> None:
        found.append(("places", outputs.shape[_PLACES]))

    def note_heads(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.append(("heads", inputs[0].shape[_HEADS]))

    hooks = []
    for name, how in plan_of(model).items():
        module = model.get_submodule(name)
        if how == "cut":
            hooks.append(module.register_forward_hook(note))
        elif how == "heads":
            hooks.append(module.register_forward_pre_hook(note_heads))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    for what, number in found:
        if number % parts:
            divisors = [str(each) for each in range(1, number + 1) if number % each == 0]
            raise ConfigError(
                f"parallel.sequence={parts} with {number} {what}: expected a divisor of {number}. "
                f"Set parallel.sequence={' or '.join(divisors[:6])}, or another number of {what}."
            )


def split_sequences(model: nn.Module, parts: SequenceParts) -> None:
    """Have a model compute on this rank's places of sequences."""
    for name, how in plan_of(model).items():
        module = model.get_submodule(name)
        module.forward = KINDS[how](parts, module.forward)
