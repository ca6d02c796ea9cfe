"""Batch normalization with the statistics of all ranks."""

from typing import Any

import tensorflow as tf

from tutti.horovod import basics
from tutti.horovod.tensorflow.bridge import not_converted
from tutti.horovod.tensorflow.collectives import Average, allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # pyright: ignore[reportUntypedBaseClass]
    """BatchNormalization of `tf.keras` over all ranks, which count equally whatever the sizes of their batches."""

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError(
                f"fused={fused}: SyncBatchNormalization does not support fused batch norm. Leave fused out."
            )
        super().__init__(**kwargs)

    @not_converted
    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mean, variance = super()._moments(inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if basics.size() == 1:
            return mean, variance
        wide = tf.float32 if mean.dtype in (tf.float16, tf.bfloat16) else mean.dtype
        own_mean, own_variance = tf.cast(mean, wide), tf.cast(variance, wide)
        own = tf.stack([own_mean, own_variance + tf.square(own_mean)])  # the means of x and of its square
        whole = allreduce(own, op=Average, name=f"sync_batch_norm.{self.name}")
        return tf.cast(whole[0], mean.dtype), tf.cast(tf.maximum(whole[1] - tf.square(whole[0]), 0), variance.dtype)
