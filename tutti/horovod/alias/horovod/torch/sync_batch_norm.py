"""Batch norm with statistics over all ranks."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.torch.sync_batch_norm")
