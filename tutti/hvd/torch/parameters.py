"""The parameters of an optimizer: names by which ranks find each other's, and groups that travel together."""

import inspect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

Unit = tuple[torch.Tensor, ...]  # parameters whose gradients are reduced together
Groups = int | list[list[torch.Tensor]] | None


def own_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What to build another optimizer of this class with, so that it has the same defaults."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}


def name_parameters(
    parameters: Sequence[Sequence[torch.Tensor]], named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """A name for each parameter, by which ranks find each other's gradients: the given one, or its place."""
    if named is None:
        places = enumerate(parameters)
        return {each: f"allreduce.noname.{i}.{j}" for i, group in places for j, each in enumerate(group)}
    pairs = list(named)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = find_duplicates([name for name, _ in pairs])
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(sorted(duplicates))}"
        )
    names = {parameter: name for name, parameter in pairs}
    missing = [tuple(each.shape) for group in parameters for each in group if each not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Their shapes: {', '.join(map(str, missing))}. Give the names of all parameters of the optimizer."
        )
    return names


def find_duplicates(values: Iterable[Any]) -> set[Any]:
    """What is there more than once."""
    return {value for value, count in Counter(values).items() if count > 1}


def check_groups(groups: Groups) -> None:
    """Refuse groups that are neither a number nor lists of different tensors."""
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups <= 0:
            raise ValueError(f"groups={groups!r}: expected a positive number of groups, or a list of lists of tensors.")
        return
    tensors = [each for group in groups for each in group]
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        raise ValueError("groups must consist of torch.Tensor: expected a list of lists of parameters.")
    if len({id(each) for each in tensors}) < len(tensors):
        raise ValueError("A parameter can only appear once in groups.")


def form_units(parameters: Sequence[torch.Tensor], groups: Groups) -> list[Unit]:
    """The parameters in the groups that are asked for: contiguous parts, or the given ones and the rest one by one."""
    if groups is None:
        return [(parameter,) for parameter in parameters]
    if isinstance(groups, int):
        each, more = divmod(len(parameters), groups)
        ends = [place * each + min(place, more) for place in range(groups + 1)]
        formed = [parameters[begin:end] for begin, end in itertools.pairwise(ends)]
    else:
        known, grouped = set(parameters), {parameter for group in groups for parameter in group}
        formed = [[parameter for parameter in group if parameter in known] for group in groups]
        formed += [[parameter] for parameter in parameters if parameter not in grouped]
    return [tuple(group) for group in formed if group]
