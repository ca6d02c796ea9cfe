"""The loop of elastic training, for every framework."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(
    __name__, "tutti.hvd.elastic", "tutti.hvd.elastic.state", "tutti.hvd.elastic.loop"
)
