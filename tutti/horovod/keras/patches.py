"""Changes to Keras 3: support for distributed optimizers, and for the arguments of Keras 2."""

import functools
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from tutti.horovod.keras.backends import backend_of, is_legacy, keras_alone

JIT_OFF = (
    "jit_compile is switched off for this model: XLA cannot compile the exchange of gradients between ranks. "
    "Call model.compile(..., jit_compile=False) to avoid this warning."
)

log = logging.getLogger("tutti.horovod")
_warned: set[str] = set()
_accepts_keras_2 = False


def is_distributed(optimizer: Any) -> bool:
    """Return whether `hvd.DistributedOptimizer` made an optimizer."""
    return hasattr(optimizer, "_distribution")


class CallableList(list):
    """A list that returns itself when it is called: `optimizer.variables` is a method in Keras 2."""

    def __call__(self) -> "CallableList":
        return self


def apply() -> None:
    """Apply the changes for distributed optimizers; a second call does nothing."""
    import keras

    _agree_on_finite(keras.optimizers.LossScaleOptimizer)
    _make_without_jit(keras.Model)


def switch_off_jit(model: Any) -> None:
    """Switch off the compilation of a model's step by XLA, if its optimizer is distributed."""
    if _is_on_jax(model):  # which compiles the call back into Python
        return
    if not any(map(is_distributed, (getattr(model.optimizer, "inner_optimizer", None), model.optimizer))):
        return
    for name in ("jit_compile", "_jit_compile"):  # of Keras 3, and of Keras 2
        if getattr(model, name, False):
            log.warning(JIT_OFF)
            setattr(model, name, False)


def _is_on_jax(model: Any) -> bool:
    import keras

    return keras.backend.backend() == "jax" and not is_legacy(model)


def _agree_on_finite(kind: Any) -> None:
    """Let a LossScaleOptimizer skip a step on all ranks if the gradients of one rank are not finite."""
    check = kind.check_finite
    if hasattr(check, "of_all_ranks"):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite, inner = check(self, grads), self.inner_optimizer
        if not is_distributed(inner) or not inner._options.is_active:
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


def accept_keras_2() -> None:
    """Make Keras 3 accept the arguments and methods of Keras 2; a second call does nothing."""
    global _accepts_keras_2
    if _accepts_keras_2:
        return
    _accepts_keras_2 = True
    keras = keras_alone()
    _optimizers(keras.optimizers.Optimizer.__mro__)
    _models(keras.Model)
    _backend(keras.backend)
    _legacy_optimizers(keras.optimizers)
    _before(keras.layers.BatchNormalization, "__init__", _dropping("BatchNormalization", "fused"))
    if not hasattr(keras.Variable, "ref"):  # a hashable key for a variable
        keras.Variable.ref = lambda self: self.value.ref()  # pyright: ignore[reportAttributeAccessIssue]


def _optimizers(kinds: tuple[type, ...]) -> None:
    base: Any = next(kind for kind in kinds if "learning_rate" in vars(kind) and "variables" in vars(kind))

    def take_lr(args: Any, kwargs: Any) -> None:
        if "lr" in kwargs:
            _warn("optimizer(lr=...)", "optimizer(learning_rate=...)")
            kwargs["learning_rate"] = kwargs.pop("lr")

    def set_rate(self: Any, rate: Any) -> None:
        self.learning_rate = rate

    _before(base, "__init__", take_lr)
    _before(base, "apply_gradients", _dropping("apply_gradients", "experimental_aggregate_gradients"))
    base.lr = property(lambda self: self.learning_rate, set_rate)
    own = base.variables.fget
    base.variables = property(lambda self: CallableList(own(self)))


def _legacy_optimizers(optimizers: Any) -> None:
    """Make `optimizers.legacy.Adam` and others, which Keras 3 only refuses, create the optimizers of Keras 3."""

    def constructor(name: str) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            _warn(f"optimizers.legacy.{name}(...)", f"optimizers.{name}(...)")
            return getattr(optimizers, name)(*args, **kwargs)

        return make

    for place in ("keras.optimizers.legacy", "keras._tf_keras.keras.optimizers.legacy"):
        with suppress(ImportError):
            legacy = import_module(place)
            for name in ("Adagrad", "Adam", "Ftrl", "RMSprop", "SGD"):
                setattr(legacy, name, constructor(name))


def _models(model: Any) -> None:
    _before(model, "compile", _dropping("compile", "experimental_run_tf_function"))
    _before(model, "fit", _dropping("fit", "workers", "use_multiprocessing", "max_queue_size"))

    def fit_generator(self: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `fit`."""
        _warn("model.fit_generator(...)", "model.fit(...)")
        names = ("steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data", "validation_steps")
        return self.fit(generator, **dict(zip(names, args, strict=False)), **kwargs)

    save_weights = model.save_weights

    def save_weights_by_suffix(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Save weights, in the format of Keras 2 if the name ends with .h5 but not with .weights.h5."""
        name = str(filepath)
        if not name.endswith(".h5") or name.endswith(".weights.h5"):
            return save_weights(self, filepath, *args, **kwargs)
        _warn(f"save_weights({name!r})", f"save_weights({name.removesuffix('.h5') + '.weights.h5'!r})")
        import h5py
        from keras.src.legacy.saving import legacy_h5_format

        with h5py.File(name, "w") as file:
            return legacy_h5_format.save_weights_to_hdf5_group(file, self)

    model.fit_generator = fit_generator
    model.save_weights = save_weights_by_suffix


def _backend(backend: ModuleType) -> None:
    def get_value(x: Any) -> Any:
        """Return the value of a variable as an array."""
        return x.numpy() if hasattr(x, "numpy") else x

    def set_value(x: Any, value: Any) -> None:
        """Assign a value to a variable."""
        x.assign(value)

    for function in (get_value, set_value):
        if not hasattr(backend, function.__name__):
            setattr(backend, function.__name__, function)


def _before(kind: Any, name: str, change: Callable[[Any, Any], None]) -> None:
    """Let a function change the arguments of a method, in the class that defines it: Keras compares the methods."""
    kind = next(each for each in kind.__mro__ if name in vars(each))
    method = getattr(kind, name)

    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        change(args, kwargs)
        return method(self, *args, **kwargs)

    changed.__signature__ = inspect.signature(method)  # pyright: ignore[reportAttributeAccessIssue]  # Keras reads it
    setattr(kind, name, changed)


def _dropping(where: str, *names: str) -> Callable[[Any, Any], None]:
    def drop(args: Any, kwargs: Any) -> None:
        for name in [name for name in names if name in kwargs]:
            _warn(f"{where}({name}=...)", f"{where}(...) without it")
            del kwargs[name]

    return drop


def _warn(used: str, replacement: str) -> None:
    """Warn once of each use of Keras 2, on rank 0."""
    if used not in _warned and os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")) == "0":
        log.warning("%s belongs to Keras 2. It is accepted; for Keras 3, write %s.", used, replacement)
    _warned.add(used)
