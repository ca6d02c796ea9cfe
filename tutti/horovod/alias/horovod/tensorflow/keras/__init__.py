"""`import horovod.tensorflow.keras as hvd`: tutti.horovod.keras.of_tensorflow, and the words of Keras 2."""

from tutti.horovod.keras.old_scripts import accept

from ...forward import forward
from . import callbacks, elastic  # noqa: F401

accept()
__all__, __getattr__, _ = forward(__name__, "tutti.horovod.keras.of_tensorflow")


def __dir__() -> list[str]:
    return [*__all__, "callbacks", "elastic"]
