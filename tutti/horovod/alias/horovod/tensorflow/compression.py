"""The names of tutti.horovod.tensorflow.compression."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.tensorflow.compression")  # pyright: ignore[reportUnsupportedDunderAll]
