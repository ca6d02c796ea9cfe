"""`import tutti.horovod.torch as hvd`: Horovod's API for PyTorch (horovod.torch)."""

# ruff: noqa: F401, F403

from tutti.horovod.basics import *
from tutti.horovod.basics import add_process_set, remove_process_set
from tutti.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from tutti.horovod.gradients import Compression
from tutti.horovod.torch import elastic
from tutti.horovod.torch.collectives import *
from tutti.horovod.torch.functions import *
from tutti.horovod.torch.ops import *
from tutti.horovod.torch.optimizer import DistributedOptimizer
