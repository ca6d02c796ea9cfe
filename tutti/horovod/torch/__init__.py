"""`import tutti.horovod.torch as hvd`: Horovod's API for PyTorch, by its names."""

# ruff: noqa: F401, F403

from tutti.horovod.basics import *
from tutti.horovod.basics import add_process_set, remove_process_set
from tutti.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from tutti.horovod.gradients import Compression
from tutti.horovod.torch import elastic
from tutti.horovod.torch.collectives import (
    SyncBatchNorm,
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from tutti.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    sparse_allreduce_async,
)
from tutti.horovod.torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    init,
    join,
    poll,
    reducescatter_async,
    shutdown,
    synchronize,
)
from tutti.horovod.torch.optimizer import DistributedOptimizer
