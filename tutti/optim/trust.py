"""The trust ratio: how far the weights of a layer may move, measured by how long they are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


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
