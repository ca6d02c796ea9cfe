"""The names of tutti.hvd.tensorflow.functions."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.hvd.tensorflow.functions")  # pyright: ignore[reportUnsupportedDunderAll]
