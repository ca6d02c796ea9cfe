"""LARS: a learning rate for each layer, in proportion to the norm of its weights (You, Gitman and Ginsburg, 2017)."""

from collections.abc import Iterable
from typing import Any

import torch

from tutti.optim.trust import LayerwiseOptimizer, gradients_of, norms_of, scale_by_trust


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
