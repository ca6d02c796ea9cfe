"""Losses by name, made of Keras."""

from typing import Any

import keras


def cross_entropy(label_smoothing: float = 0.0) -> keras.losses.Loss:
    """The mean cross entropy of class scores, with labels as numbers of classes."""
    if not label_smoothing:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return SmoothedCrossEntropy(label_smoothing)


class SmoothedCrossEntropy(keras.losses.Loss):
    """Cross entropy with a share of each label spread over all classes."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__(name="smoothed_cross_entropy")
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        wanted = keras.ops.one_hot(keras.ops.cast(y_true, "int32"), y_pred.shape[-1])
        return keras.losses.categorical_crossentropy(
            wanted, y_pred, from_logits=True, label_smoothing=self.label_smoothing
        )
