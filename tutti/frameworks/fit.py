"""Training by Keras' own `fit`; what is not Keras' happens in one callback."""

from itertools import islice
from typing import Any

import keras

from tutti.frameworks.job import Job
from tutti.horovod.keras import backends


class BetweenSteps(keras.callbacks.Callback):
    """Rates, logs, validation and checkpoints, in the order in which they happen."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._job.before_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._job.after_step(float((logs or {})["loss"]))  # collective where a log window ends
        if not self._job.goes_on():
            self._job.network.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._job.feed.error is None and self._job.epoch_ends:
            self._job.finish_epoch()  # collective: validation, the checkpoint
            if self._job.has_reached:
                self._job.network.model.stop_training = True


def train(job: Job) -> None:
    """Train to the end of the recipe; gradients are averaged over ranks by the optimizer, in each step."""
    backends.current().broadcast_variables(job.network.state(), root_rank=0)  # collective
    job.begin()  # collective: the loss before the first step, and validation
    per_epoch = job.plan.steps_per_epoch
    batches = job.feed.arrays()
    while job.step < job.plan.total_steps and job.feed.error is None and job.goes_on():
        done, whole_epochs = job.step % per_epoch, job.plan.epochs - job.step // per_epoch
        # A run that goes on inside an epoch ends that one first.
        steps, epochs = (per_epoch - done, 1) if done else (per_epoch, whole_epochs)
        between = [BetweenSteps(job)]
        own = (batch for batch in islice(batches, steps * epochs))  # fit may take a batch more than it trains on
        job.network.model.fit(own, steps_per_epoch=steps, epochs=epochs, shuffle=False, verbose=0, callbacks=between)
    job.hand_over()  # collective where the run was stopped before its end: the checkpoint
    job.end()  # collective
