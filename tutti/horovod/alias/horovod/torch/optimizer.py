"""The optimizer that reduces gradients over ranks."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.torch.optimizer")
