"""Optimizers by name, with fused kernels where possible."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tutti.config import parts
from tutti.config.options import MuonOptions, OptimizerOptions
from tutti.errors import ConfigError


def build_optimizer(
    config: OptimizerOptions, model: nn.Module, hidden: frozenset[str] | None = None
) -> torch.optim.Optimizer:
    """Builds the optimizer that a recipe names, for the trained parameters of a model.

    Where the model is a part of another, `hidden` is what `hidden_weights` has found in the whole one.
    """
    if isinstance(config, MuonOptions):
        return _build_muon(config, model, hidden)
    return _build_for(config, [parameter for parameter in model.parameters() if parameter.requires_grad])


def build_optimizers(config: OptimizerOptions, model: nn.Module) -> Any:
    """Builds what a step of the user's own gets: the optimizer that a recipe names, or what a function makes.

    A function of the user's takes the model, and returns an optimizer or a mapping from names to optimizers.
    """
    if config.target:
        return build_optimizer(config, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = parts.call(config.locate(), "optim", config.options(), params=trained, model=model)
    for each in made.values() if isinstance(made, Mapping) else [made]:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(
                f"optim.name={config.name!r} gave a {type(each).__name__}: expected an optimizer, or a mapping from "
                "names to optimizers."
            )
    return made


def hidden_weights(config: OptimizerOptions, model: nn.Module) -> frozenset[str] | None:
    """Returns the names of the hidden weights of a whole model, if the optimizer of a recipe tells them from others."""
    if not isinstance(config, MuonOptions):
        return None
    from tutti.optim.muon import find_hidden

    return find_hidden(model)


def _build_muon(config: MuonOptions, model: nn.Module, hidden: frozenset[str] | None = None) -> torch.optim.Optimizer:
    """Builds Muon for the hidden weights of a model and `others` for the rest, or Muon for all parameters."""
    from tutti.optim.muon import Muon, find_hidden

    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if config.others is None:
        if hidden is None and all(each.ndim < 2 for each in trained.values()):
            raise _no_matrix(model, "a trained weight of two or more dimensions. Choose another model")
        return parts.call(Muon, "optim", config.options() | {"params": list(trained.values())})
    if hidden is None:
        hidden = find_hidden(model)
        if not hidden:
            raise _no_matrix(
                model,
                "a trained linear layer or convolution between its first and its last layer, or the method "
                "hidden_weights(), which names such weights. Choose another model, leave out optim.others, without "
                "which Muon updates all parameters",
            )
    matrices = [each for name, each in trained.items() if name in hidden]
    rest = [each for name, each in trained.items() if name not in hidden]
    others = _build_for(config.others, rest, "optim.others") if rest else None
    return parts.call(Muon, "optim", config.options() | {"params": matrices, "others": others})


def _no_matrix(model: nn.Module, expected: str) -> ConfigError:
    return ConfigError(
        f"optim.name='muon' with {type(model).__name__}, which has no matrix for it: expected {expected}, or choose "
        "another optimizer, as optim.name=adamw."
    )


def _build_for(config: OptimizerOptions, parameters: list[nn.Parameter], where: str = "optim") -> torch.optim.Optimizer:
    """Builds an optimizer of all these parameters alike; `where` are its options in the recipe."""
    target = config.locate()
    offered = {"fused": True} if config.target and _can_fuse(target, parameters) else {}
    return parts.call(target, where, config.options() | {"params": parameters}, **offered)


def _can_fuse(target: Any, parameters: list[nn.Parameter]) -> bool:
    if any(hasattr(p, "placements") for p in parameters) and not issubclass(target, torch.optim.Adam):
        return False  # of the fused kernels, DTensors have those of Adam and AdamW alone
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
