"""How gradients are made smaller for their way."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.torch.compression")
