"""Samples divided among a changing number of ranks."""

from ...forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.torch.elastic")
