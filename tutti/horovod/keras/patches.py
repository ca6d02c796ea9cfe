"""Two places where Keras 3 must know that an optimizer is distributed: changed once, and for such optimizers alone."""

import logging
from typing import Any

from tutti.horovod.keras.backends import backend_of, is_legacy

JIT_OFF = (
    "jit_compile is switched off for this model: XLA cannot compile the exchange of gradients between ranks. "
    "Write model.compile(..., jit_compile=False) to say so yourself."
)

log = logging.getLogger("tutti.horovod")


def apply() -> None:
    """Change what has not been changed yet."""
    import keras

    _agree_on_finite(keras.optimizers.LossScaleOptimizer)
    _make_without_jit(keras.Model)


def switch_off_jit(model: Any) -> None:
    """Say that a model's step is not to be compiled, if it was."""
    from tutti.horovod.keras import legacy, optimizer

    if _compiles_around_it(model):
        return
    distributed = getattr(model.optimizer, "inner_optimizer", None), model.optimizer
    if not any(isinstance(each, optimizer.Distributed | legacy.Distributed) for each in distributed):
        return
    for name in ("jit_compile", "_jit_compile"):  # of Keras 3, and of Keras 2
        if getattr(model, name, False):
            log.warning(JIT_OFF)
            setattr(model, name, False)


def _compiles_around_it(model: Any) -> bool:
    import keras

    return keras.backend.backend() == "jax" and not is_legacy(model)


def _agree_on_finite(kind: Any) -> None:
    """LossScaleOptimizer around a distributed one: all ranks must reduce in a step, or none."""
    check = kind.check_finite
    if hasattr(check, "of_all_ranks"):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        from tutti.horovod.keras.optimizer import Distributed

        finite, inner = check(self, grads), self.inner_optimizer
        if not isinstance(inner, Distributed) or not inner._options.is_active:
            return finite
        return backend_of(self).agree(finite, inner._options.process_set)

    check_finite.of_all_ranks = True  # pyright: ignore[reportFunctionMemberAccess]
    kind.check_finite = check_finite


def _make_without_jit(kind: Any) -> None:
    make = kind.make_train_function
    if hasattr(make, "without_jit"):
        return

    def make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        switch_off_jit(self)
        return make(self, *args, **kwargs)

    make_train_function.without_jit = True  # pyright: ignore[reportFunctionMemberAccess]
    kind.make_train_function = make_train_function
