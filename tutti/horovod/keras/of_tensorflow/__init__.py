"""Horovod's API for the Keras of TensorFlow (horovod.tensorflow.keras)."""

# ruff: noqa: F401, F403

from tutti.horovod.basics import *
from tutti.horovod.basics import add_process_set, remove_process_set
from tutti.horovod.keras import (
    Average,
    Compression,
    Sum,
    allgather,
    broadcast,
    broadcast_global_variables,
    elastic,
    init,
    reducescatter,
    shutdown,
)
from tutti.horovod.keras import optimizer_of_tensorflow as DistributedOptimizer
from tutti.horovod.keras.backends import allreduce_function, keras_of_tensorflow
from tutti.horovod.keras.of_tensorflow import callbacks
from tutti.horovod.keras.optimizer import load_model_function

allreduce = allreduce_function(default_average=None)
load_model = load_model_function(keras_of_tensorflow)
