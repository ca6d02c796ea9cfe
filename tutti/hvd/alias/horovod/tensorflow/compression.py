"""The names of tutti.hvd.tensorflow.compression."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.hvd.tensorflow.compression")  # pyright: ignore[reportUnsupportedDunderAll]
