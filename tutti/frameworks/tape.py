"""Training with TensorFlow alone: a gradient tape in a compiled function, and a loop around it."""

from typing import Any

import tensorflow as tf

import tutti.horovod.tensorflow as hvd
from tutti.frameworks.job import Job


def train(job: Job) -> None:
    """Train to the end of the recipe. Every rank walks the same steps; marked lines are collectives."""
    network, model, optimizer = job.network, job.network.model, job.network.optimizer
    loss_mean, *metrics = network.measures

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = model(images, training=True)
            loss = network.criterion(labels, scores)
            scaled = optimizer.scale_loss(loss)  # by 1, but in fp16
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(scaled, model.trainable_variables)  # collective: the mean over ranks
        optimizer.apply(gradients, model.trainable_variables)
        loss_mean.update_state(loss, sample_weight=tf.shape(images)[0])
        for metric in metrics:
            metric.update_state(labels, scores)
        return loss

    job.begin()  # collective: the loss before the first step, and validation
    is_first = True
    for images, labels in job.feed.arrays():
        if not job.goes_on():
            break
        job.before_step()
        loss = step(tf.constant(images), tf.constant(labels))
        if is_first:
            hvd.broadcast_variables(network.state(), root_rank=0)  # collective
            is_first = False
        job.after_step(loss)  # collective where a log window ends
        if job.epoch_ends:
            job.finish_epoch()  # collective: validation, the checkpoint
    job.hand_over()  # collective where the run was stopped before its end: the checkpoint
    job.end()  # collective
