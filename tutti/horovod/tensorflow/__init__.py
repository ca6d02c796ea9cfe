"""`import tutti.horovod.tensorflow as hvd`: Horovod's API for TensorFlow 2 (horovod.tensorflow)."""

# ruff: noqa: F401, F403

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec("tensorflow") is None:
    raise ImportError(
        "tutti.horovod.tensorflow (horovod.tensorflow) needs TensorFlow, which is not installed. "
        "Install it with: pip install 'tutti-train[tensorflow]'"
    )

# An operation of a graph that waits for other ranks occupies one of these threads; a script may set its own number.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", str(max(os.cpu_count() or 1, 64)))

from tutti.horovod.basics import *
from tutti.horovod.basics import add_process_set, remove_process_set
from tutti.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from tutti.horovod.gradients import Compression
from tutti.horovod.tensorflow.bridge import *
from tutti.horovod.tensorflow.bridge import executing_eagerly as _executing_eagerly
from tutti.horovod.tensorflow.collectives import *
from tutti.horovod.tensorflow.training import *
from tutti.horovod.torch.arguments import reduce_op as _reduce_op
from tutti.horovod.torch.ops import init, shutdown


def __getattr__(name: str) -> Any:
    """Import what needs Keras on first use."""
    if name == "SyncBatchNormalization":
        return import_module("tutti.horovod.tensorflow.sync_batch_norm").SyncBatchNormalization
    if name == "elastic":
        return import_module("tutti.horovod.tensorflow.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the reduction; `average` is the deprecated way to select it."""
    return _reduce_op(op, average)
