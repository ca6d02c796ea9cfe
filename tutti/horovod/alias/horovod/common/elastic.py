"""The loop of elastic training, for every framework."""

from ..forward import forward

__all__, __getattr__, __dir__ = forward(
    __name__, "tutti.horovod.elastic", "tutti.horovod.elastic.state", "tutti.horovod.elastic.state"
)
