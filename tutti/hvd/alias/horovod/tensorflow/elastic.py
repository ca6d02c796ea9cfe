"""The names of tutti.hvd.tensorflow.elastic."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.hvd.tensorflow.elastic")  # pyright: ignore[reportUnsupportedDunderAll]
