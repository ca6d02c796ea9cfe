"""Parameters, optimizer state and objects from one rank to all."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.torch.functions")
