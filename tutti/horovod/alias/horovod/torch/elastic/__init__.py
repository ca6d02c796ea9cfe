"""Training that goes on when ranks come and go."""

from ...forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.torch.elastic")
