"""What an elastic run keeps, restores and sends to new ranks."""

from ...forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.torch.elastic")
