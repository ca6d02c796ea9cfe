"""Where libraries look for the collectives, and for who this rank is."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(  # pyright: ignore[reportUnsupportedDunderAll]
    __name__, "tutti.horovod.tensorflow.collectives", "tutti.horovod.tensorflow"
)
