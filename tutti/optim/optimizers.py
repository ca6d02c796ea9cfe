"""Optimizers by name, with fused kernels where possible; LARS and LAMB with a learning rate for each layer."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tutti.config import parts
from tutti.config.options import OptimizerOptions


class LayerwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that moves whole layers at a time; one-dimensional parameters have neither trust ratio nor decay."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step for all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                there = [parameter for parameter in group["params"] if parameter.grad is not None]
                for is_layer in (True, False):
                    parameters = [parameter for parameter in there if (parameter.ndim > 1) == is_layer]
                    if parameters:
                        self.move(parameters, group, is_layer)
        return loss

    def move(self, parameters: list[torch.Tensor], group: dict[str, Any], is_layer: bool) -> None:
        """Move parameters that are all weights of layers, or all biases and scales of norms."""
        raise NotImplementedError

    def buffers(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """What the state keeps under a name for each parameter, zeros at first."""
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [self.state[parameter][name] for parameter in parameters]


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def norms_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm of each tensor, left on its device."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def scale_by_trust(updates: list[torch.Tensor], numerators: torch.Tensor, denominators: torch.Tensor) -> None:
    """Multiply each update by its ratio; by 1 where a norm is 0 and says nothing."""
    said = (numerators > 0) & (denominators > 0)
    ratios = torch.where(said, numerators / denominators, 1.0)
    torch._foreach_mul_(updates, list(ratios.unbind()))


class Lars(LayerwiseOptimizer):
    """Momentum over steps of `lr * eta * |w| / (|g| + weight_decay * |w|)`, where `lr` is that of each step."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        eta: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    def move(self, parameters: list[torch.Tensor], group: dict[str, Any], is_layer: bool) -> None:
        gradients, decay = gradients_of(parameters), group["weight_decay"]
        updates = list(torch._foreach_mul(gradients, group["lr"]))
        if is_layer:
            weight_norms = norms_of(parameters)
            torch._foreach_add_(updates, parameters, alpha=group["lr"] * decay)
            scale_by_trust(updates, group["eta"] * weight_norms, norms_of(gradients) + decay * weight_norms)
        velocities = self.buffers(parameters, "velocity")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates)
        torch._foreach_sub_(parameters, velocities)


class Lamb(LayerwiseOptimizer):
    """Steps of `lr * |w| / |u|` along `u`, Adam's step with decoupled weight decay."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def move(self, parameters: list[torch.Tensor], group: dict[str, Any], is_layer: bool) -> None:
        updates = self._directions(parameters, group)
        if is_layer:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            scale_by_trust(updates, norms_of(parameters), norms_of(updates))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _directions(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        """The mean of the gradients over the root of the mean of their squares, both without their bias to 0."""
        gradients, (beta1, beta2) = gradients_of(parameters), group["betas"]
        means, squares = self.buffers(parameters, "mean"), self.buffers(parameters, "square")
        steps = self._count(parameters)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        directions = list(torch._foreach_div(means, [1 - beta1**step for step in steps]))
        torch._foreach_div_(directions, roots)
        return directions

    def _count(self, parameters: list[torch.Tensor]) -> list[float]:
        """The steps of each parameter, this one included, kept on the host as torch's optimizers keep theirs."""
        for parameter in parameters:
            state = self.state[parameter]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
        return [self.state[parameter]["step"].item() for parameter in parameters]


def build_optimizer(config: OptimizerOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that a recipe names, over the given parameters."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    target = config.locate()
    offered = {"fused": True} if config.target and _can_fuse(trainable) else {}
    return parts.call(target, "optim", config.options() | {"params": trainable}, **offered)


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
