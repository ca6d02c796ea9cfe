"""The callbacks of horovod.tensorflow.keras, with the checkpoint of TensorFlow's Keras."""

from typing import Any

from tutti.horovod.keras.backends import keras_of_tensorflow
from tutti.horovod.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    check_path,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

ModelCheckpoint: Any = keras_of_tensorflow().callbacks.ModelCheckpoint


class TensorFlowBestModelCheckpoint(ModelCheckpoint):
    """Saves the best model, or its weights, to `filepath`, which is set after construction."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(
            "best.weights.h5" if save_weights_only else "best.keras",
            monitor,
            verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        check_path(self)
        super().on_train_begin(logs)


BestModelCheckpoint = TensorFlowBestModelCheckpoint
