"""LAMB: Adam's direction, as long in each layer as the weights are (You et al., 2019)."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from tutti.optim.trust import LayerwiseOptimizer, gradients_of, norms_of, scale_by_trust


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
