"""The names of tutti.horovod.tensorflow.elastic."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.tensorflow.elastic")  # pyright: ignore[reportUnsupportedDunderAll]
