"""Training by Keras' own `fit`, or with a gradient tape of TensorFlow, around the same job."""

from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import keras

from tutti.frameworks.feed import Feed
from tutti.frameworks.learner import KerasLearner
from tutti.horovod.keras import backends
from tutti.train.job import Job
from tutti.units import count


class Profile:
    """Traces the steps from a first to a last one, counted from 1, with TensorFlow's profiler; for TensorBoard."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        self.folder = folder
        self._steps = steps  # None traces nothing
        self._runs = False

    def before(self, step: int) -> None:
        """Start the trace at the first step, or at a later one if the run is resumed there."""
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self._runs:
            import tensorflow as tf

            tf.profiler.experimental.start(str(self.folder))
            self._runs = True

    def after(self, step: int) -> bool:
        """Stop the trace after the last step; returns whether a trace was written."""
        if not (self._runs and self._steps and step >= self._steps[1]):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Stop a trace that is running."""
        if self._runs:
            import tensorflow as tf

            tf.profiler.experimental.stop()
            self._runs = False


class BetweenSteps(keras.callbacks.Callback):
    """Learning rates, logs, validation and checkpoints around the steps of a job, in their order."""

    def __init__(self, job: Job[KerasLearner]) -> None:
        super().__init__()
        self.feed = Feed(job.next_batch, job.clock)
        self._job = job
        steps = job.config.log.profile if job.group.is_first else None
        self._profile = Profile(steps, job.folder.path / "profile")

    def begin(self) -> None:
        """Write the loss before the first step, and prepare the learner; every rank must call this."""
        job = self._job
        job.begin()
        job.learner.start(job.group.rank, job.step)
        job.clock.start()

    def before_step(self) -> None:
        """Set the learning rate of the next step."""
        self._job.learner.set_rate(self._job.lr)
        self._job.learner.begin_step(self._job.step + 1)
        self._profile.before(self._job.step + 1)

    def after_step(self, loss: Any) -> None:
        """Count the step; log and save if that is due within an epoch, which is collective."""
        job = self._job
        job.learner.end_step(job.step + 1)
        job.end_step(loss)
        if self._profile.after(job.step):
            job.journal.say(f"trace of steps for TensorBoard: {self._profile.folder}")
        if job.logs_after(job.step):
            job.log()
        if not job.epoch_ends and job.saves_now:
            job.save()

    def after_epoch(self) -> None:
        """Save if that is due, and validate; every rank must call this."""
        self._job.finish_epoch()
        if self._job.saves_now:
            self._job.save()

    def end(self) -> None:
        """Save a run that was stopped, average statistics over ranks, and write the speed; collective."""
        job = self._job
        job.finish()
        if self.feed.error is not None:
            raise self.feed.error
        job.learner.combine_ranks(job.group)
        if speed := images_per_second(job):
            windows = f"over {count(speed['windows'], 'log window')}"
            job.journal.say(f"{speed['mean']:,.0f} images/s, spread {speed['spread']:,.0f}, {windows}")

    def close(self) -> None:
        """Stop the loader and the profiler."""
        self._job.end_loading()
        self._profile.close()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._job.begin_step()
        self.before_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after_step(float((logs or {})["loss"]))
        if not self._job.goes_on():
            self._job.learner.compiled.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.feed.error is None and self._job.epoch_ends:
            self.after_epoch()
            if self._job.has_reached:
                self._job.learner.compiled.stop_training = True


def train_by_fit(job: Job[KerasLearner]) -> None:
    """Train to the end of the recipe; gradients are averaged over ranks by the optimizer, in each step."""
    between = BetweenSteps(job)
    backends.current().broadcast_variables(job.learner.state(), root_rank=0)  # collective
    try:
        between.begin()  # collective: the loss before the first step, and validation
        per_epoch = job.plan.steps_per_epoch
        batches = between.feed.arrays()
        while job.step < job.plan.total_steps and between.feed.error is None and job.goes_on():
            done, left = job.step % per_epoch, job.plan.total_steps - job.step
            # A run that is resumed inside an epoch ends that one first; max_steps may end inside another.
            is_part = done or left < per_epoch
            steps, epochs = (min(per_epoch - done, left), 1) if is_part else (per_epoch, left // per_epoch)
            own = (batch for batch in islice(batches, steps * epochs))  # fit may take one batch more than it uses
            job.learner.compiled.fit(
                own, steps_per_epoch=steps, epochs=epochs, shuffle=False, verbose=0, callbacks=[between]
            )
        between.end()  # collective
    finally:
        between.close()


def train_by_tape(job: Job[KerasLearner]) -> None:
    """Train to the end of the recipe. Every rank makes the same steps; marked lines are collectives."""
    import tensorflow as tf

    import tutti.horovod.tensorflow as hvd
    from tutti.horovod.gradients import ReductionOptions
    from tutti.horovod.tensorflow.training import Reduction

    learner, between = job.learner, BetweenSteps(job)
    model, optimizer = learner.compiled, learner.optimizer
    loss_mean, *metrics = learner.measures
    average = Reduction("DistributedGradientTape_Allreduce", ReductionOptions())

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = model(images, training=True)
            loss = learner.criterion(labels, scores)
            scaled = optimizer.scale_loss(loss)  # by 1, except in fp16
        own = tape.gradient(scaled, model.trainable_variables)
        gradients = average.apply(own)  # collective: the mean over ranks
        if learner.squares:
            learner.squares.observe(own, gradients)
        optimizer.apply(gradients, model.trainable_variables)
        loss_mean.update_state(loss, sample_weight=tf.shape(images)[0])
        for metric in metrics:
            metric.update_state(labels, scores)
        return loss

    is_first = True
    try:
        between.begin()  # collective: the loss before the first step, and validation
        for batch in job.batches():
            images, labels = between.feed.convert(batch)
            between.before_step()
            loss = step(tf.constant(images), tf.constant(labels))
            if is_first:
                hvd.broadcast_variables(learner.state(), root_rank=0)  # collective
                is_first = False
            between.after_step(loss)  # collective where a log window ends
            if job.epoch_ends:
                between.after_epoch()  # collective: validation, the checkpoint
        between.end()  # collective
    finally:
        between.close()


def images_per_second(job: Job[Any]) -> dict[str, float]:
    """The mean and standard deviation over log windows, and their number; without the first, which compiles graphs."""
    rates = job.rates[1:]
    if not rates:
        return {}
    return {"mean": mean(rates), "spread": stdev(rates) if len(rates) > 1 else 0.0, "windows": len(rates)}
