"""The names of tutti.horovod.tensorflow.functions."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.tensorflow.functions")  # pyright: ignore[reportUnsupportedDunderAll]
