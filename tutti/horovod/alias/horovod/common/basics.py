"""Start and end of a job, and who this rank is in it."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.basics")
