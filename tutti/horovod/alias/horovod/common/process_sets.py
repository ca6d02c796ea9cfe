"""Groups of ranks that work together."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.process_sets", "tutti.horovod.basics")
