"""Callbacks for fit."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(__name__, "tutti.horovod.keras.callbacks")
