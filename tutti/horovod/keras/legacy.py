"""The same for optimizers of Keras 2 (tf_keras), which compute their gradients themselves: they are reduced there."""

from collections.abc import Sequence
from typing import Any

from tutti.horovod.keras.backends import backend_of
from tutti.horovod.keras.distribution import Distribution, Options
from tutti.horovod.variables import identity, variables_of


def distribute(optimizer: Any, options: Options, name: str | None = None) -> Any:
    """An optimizer of the same class, with the same settings and state, that is distributed."""
    kind = type(optimizer)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_options": options}
    way = DistributedOld if hasattr(optimizer, "_create_all_weights") else Distributed
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    wrapped: Any = type(kind.__name__, (way, kind), own)
    made = wrapped.from_config(config)
    # It does not know the variables it was built for, so that its state waits until it is told them.
    made._inherited = [variable.numpy() for variable in variables_of(optimizer)]
    return made


class Distributed:
    """In front of an optimizer of the kind that came with Keras 2.11."""

    _options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._distribution = Distribution(self._options, backend_of(self))
        self._inherited: list[Any] = []

    @property
    def _agg_helper(self) -> Distribution:
        return self._distribution

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._distribution.local_variables.add(identity(var))

    def build(self, var_list: Any) -> Any:
        """Make the state, and take over what the optimizer had that this one was made from."""
        answer = super().build(var_list)  # pyright: ignore[reportAttributeAccessIssue]
        self._inherit()
        return answer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Pairs of gradients, reduced over ranks, and variables."""
        return self._reduced(super().compute_gradients(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        return self.compute_gradients(loss, var_list, tape)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the wrapped class make its step, if one is due."""
        step, own, pairs = super().apply_gradients, self._distribution, list(grads_and_vars)  # pyright: ignore[reportAttributeAccessIssue]
        if not own.accumulates or not own.sums:
            return step(pairs, *args, **kwargs)
        iterations = self.iterations  # pyright: ignore[reportAttributeAccessIssue]
        return own.backend.choose(
            own.counter.read_value() == 0, lambda: step(pairs, *args, **kwargs), lambda: iterations.assign_add(1)
        )

    def _inherit(self) -> None:
        values, self._inherited = self._inherited, []
        variables = variables_of(self)
        if len(values) == len(variables):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _reduced(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        pairs = list(pairs)
        variables = [variable for _, variable in pairs]
        _, reduced = self._distribution.exchange([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))


class DistributedOld(Distributed):
    """In front of an optimizer of `tf_keras.optimizers.legacy`."""

    def _create_all_weights(self, var_list: Any) -> None:
        super()._create_all_weights(var_list)  # pyright: ignore[reportAttributeAccessIssue]
        self._inherit()

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        computed = super(Distributed, self)._compute_gradients(loss, var_list, grad_loss, tape)  # pyright: ignore[reportAttributeAccessIssue]
        return self._reduced(computed)

    def get_gradients(self, loss: Any, params: Any) -> Any:
        """Gradients reduced over ranks, as graphs of TensorFlow 1 ask for them."""
        own = super().get_gradients(loss, params)  # pyright: ignore[reportAttributeAccessIssue]
        return [gradient for gradient, _ in self._reduced(list(zip(own, params, strict=True)))]
