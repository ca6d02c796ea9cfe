"""`import horovod.keras as hvd`: the names of tutti.horovod.keras, and the words of Keras 2."""

from tutti.horovod.keras.old_scripts import accept

from ..forward import forward
from . import callbacks, elastic  # noqa: F401

accept()
__all__, __getattr__, _ = forward(__name__, "tutti.horovod.keras")


def __dir__() -> list[str]:
    return [*__all__, "callbacks", "elastic"]
