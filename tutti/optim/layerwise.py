"""LARS and LAMB, which scale the step of each layer."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of LARS, LAMB and Muon, which treat the weights of a layer as a whole, and one-dimensional parameters apart.

    The latter have no weight decay, and in LARS and LAMB no trust ratio.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self.update_group(group)
        return loss

    def update_group(self, group: dict[str, Any]) -> None:
        """Updates the parameters of a group that have a gradient."""
        there = [parameter for parameter in group["params"] if parameter.grad is not None]
        for is_layer in (True, False):
            parameters = [parameter for parameter in there if (parameter.ndim > 1) == is_layer]
            if parameters:
                self.update(parameters, group, is_layer)

    def update(self, parameters: list[torch.Tensor], group: dict[str, Any], is_layer: bool) -> None:
        """Updates parameters that are all weights of layers, or all one-dimensional."""
        raise NotImplementedError

    def buffers(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Returns the state tensors of a name, one for each parameter, initially zero."""
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [self.state[parameter][name] for parameter in parameters]


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def norms_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the Euclidean norms of the tensors as one tensor, without a synchronisation."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def scale_by_trust(updates: list[torch.Tensor], numerators: torch.Tensor, denominators: torch.Tensor) -> None:
    """Multiplies each update by its trust ratio, and by 1 if a norm is 0."""
    defined = (numerators > 0) & (denominators > 0)
    ratios = torch.where(defined, numerators / denominators, 1.0)
    torch._foreach_mul_(updates, list(ratios.unbind()))


class Lars(LayerwiseOptimizer):
    """SGD with momentum and a step of `lr * eta * |w| / (|g| + weight_decay * |w|)` for each layer."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        eta: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    def update(self, parameters: list[torch.Tensor], group: dict[str, Any], is_layer: bool) -> None:
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
    """A step of `lr * |w| / |u|` along `u`, the step of Adam with decoupled weight decay, for each layer."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameters: list[torch.Tensor], group: dict[str, Any], is_layer: bool) -> None:
        updates = self._directions(parameters, group)
        if is_layer:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            scale_by_trust(updates, norms_of(parameters), norms_of(updates))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _directions(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> list[torch.Tensor]:
        """Returns Adam's direction: the bias-corrected first moment over the root of the second."""
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
        """Increments and returns the step counts of the parameters, which are CPU tensors as in torch's optimizers."""
        for parameter in parameters:
            state = self.state[parameter]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
        return [self.state[parameter]["step"].item() for parameter in parameters]
