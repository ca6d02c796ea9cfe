"""The collectives for torch, and who this rank is."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(
    __name__, "tutti.horovod.torch.ops", "tutti.horovod.torch.collectives", "tutti.horovod.torch"
)
