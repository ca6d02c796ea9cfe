"""Which Keras is meant: version 3, or version 2 as the package tf_keras."""

import os
from types import ModuleType

NEEDS_KERAS = "{} needs Keras, which is not installed. Install it with: pip install 'tutti-train[keras]'"


def keras_alone() -> ModuleType:
    """What `import keras` gives."""
    try:
        import keras
    except ImportError as error:
        raise ImportError(NEEDS_KERAS.format("tutti.hvd.keras (horovod.keras)")) from error
    return keras


def keras_of_tensorflow() -> ModuleType:
    """What `tf.keras` is: Keras 3, or tf_keras where TF_USE_LEGACY_KERAS says so."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        import tf_keras  # pyright: ignore[reportMissingImports]

        return tf_keras
    return keras_alone()
