"""The errors that scripts know by name."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.errors")
