"""A saved model made ready to train on all ranks, and which Keras it belongs to: version 3, or tf_keras."""

import os
from types import ModuleType
from typing import Any

from tutti.errors import ConfigError
from tutti.horovod.keras.backends import is_legacy
from tutti.horovod.keras.distribution import Options
from tutti.horovod.keras.optimizer import distribute


def load(keras: ModuleType, filepath: Any, custom_optimizers: Any, custom_objects: Any, compression: Any) -> Any:
    """The model of a file, its optimizer distributed and with the state that was saved."""
    own = {kind.__name__: kind for kind in custom_optimizers or []} | (custom_objects or {})
    model: Any = keras.models.load_model(filepath, custom_objects=own)
    if getattr(model, "optimizer", None) is None:
        raise ConfigError(
            f"{filepath} holds a model without an optimizer: expected one that was compiled before it was saved. "
            "Load it with keras.models.load_model, and compile it with hvd.DistributedOptimizer(...)."
        )
    optimizer = distribute(model.optimizer, Options(compression=compression))
    if not is_legacy(optimizer) and str(filepath).endswith((".h5", ".hdf5")):
        _read_state(optimizer, model, filepath)
    elif is_legacy(optimizer):
        build = optimizer._create_all_weights if hasattr(optimizer, "_create_all_weights") else optimizer.build
        build(model.trainable_variables)
    model.optimizer = optimizer
    if hasattr(model, "_compile_config"):
        model._compile_config.config["optimizer"] = optimizer
    return model


def _read_state(optimizer: Any, model: Any, filepath: Any) -> None:
    """From a file in the format of Keras 2, from which Keras 3 reads no state of an optimizer for some models."""
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    optimizer.build(model.trainable_variables)
    with h5py.File(filepath, "r") as file:
        values = load_optimizer_weights_from_hdf5_group(file) if "optimizer_weights" in file else []
        if len(values) == len(optimizer.variables):
            optimizer.set_weights(values)


NEEDS_KERAS = "{} needs Keras, which is not installed. Install it with: pip install 'tutti-train[keras]'"


def keras_alone() -> ModuleType:
    """What `import keras` gives."""
    try:
        import keras
    except ImportError as error:
        raise ImportError(NEEDS_KERAS.format("tutti.horovod.keras (horovod.keras)")) from error
    return keras


def keras_of_tensorflow() -> ModuleType:
    """What `tf.keras` is: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS says so."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        import tf_keras  # pyright: ignore[reportMissingImports]

        return tf_keras
    return keras_alone()
