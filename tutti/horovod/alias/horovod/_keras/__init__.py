"""What both packages for Keras are made of."""

from ..forward import forward
from . import callbacks, elastic  # noqa: F401

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.keras.optimizer", "tutti.horovod.keras.load")
