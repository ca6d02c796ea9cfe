"""Optimizers of Keras that update weights as those of torch do, with L2 weight decay."""

from typing import Any

import keras

from tutti.config import parts
from tutti.config.options import locate
from tutti.errors import ConfigError


def sgd(
    lr: float, momentum: float, weight_decay: float, nesterov: bool, clip_norm: float | None
) -> keras.optimizers.Optimizer:
    """Stochastic gradient descent."""
    return TorchLikeSgd(lr, momentum=momentum, nesterov=nesterov, decay=weight_decay, global_clipnorm=clip_norm)


def adam(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip_norm: float | None
) -> keras.optimizers.Optimizer:
    """Adam."""
    if weight_decay:
        return DecayedAdam(lr, *betas, eps, decay=weight_decay, global_clipnorm=clip_norm)
    return keras.optimizers.Adam(lr, *betas, eps, global_clipnorm=clip_norm)


def adamw(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip_norm: float | None
) -> keras.optimizers.Optimizer:
    """Adam with decoupled weight decay."""
    return keras.optimizers.AdamW(lr, weight_decay, *betas, eps, global_clipnorm=clip_norm)


def named(target: str, lr: float, clip_norm: float | None, **options: Any) -> keras.optimizers.Optimizer:
    """An optimizer by its `package.module:object`, for example `keras.optimizers:RMSprop`."""
    make = locate(target)
    if not (isinstance(make, type) and issubclass(make, keras.optimizers.Optimizer)):
        raise ConfigError(
            f"optim.name={target!r}: expected a class of optimizers of Keras, for example keras.optimizers:RMSprop."
        )
    return parts.call(make, "optim", {"learning_rate": lr, "global_clipnorm": clip_norm, **options})


class TorchLikeSgd(keras.optimizers.SGD):
    """SGD as in torch: velocities do not include the learning rate, so that a new rate applies to them at once."""

    def __init__(self, *arguments: Any, decay: float = 0.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decay = decay

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        ops = keras.ops
        step = ops.cast(gradient, variable.dtype)
        if self.decay:
            step = ops.add(step, ops.multiply(self.decay, variable))
        if self.momentum:
            velocity = self.momentums[self._get_variable_index(variable)]
            gradient = step
            step = ops.add(ops.multiply(self.momentum, velocity), gradient)
            self.assign(velocity, step)
            if self.nesterov:
                step = ops.add(gradient, ops.multiply(self.momentum, step))
        self.assign_sub(variable, ops.multiply(ops.cast(learning_rate, variable.dtype), step))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"decay": self.decay}


class DecayedAdam(keras.optimizers.Adam):
    """Adam with L2 weight decay added to the gradients, as in torch."""

    def __init__(self, *arguments: Any, decay: float = 0.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decay = decay

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient = keras.ops.add(gradient, keras.ops.multiply(self.decay, variable))
        super().update_step(gradient, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"decay": self.decay}
