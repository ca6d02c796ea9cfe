"""The loop: everything a run does, in the order in which it happens."""

from tutti.train.job import Job
from tutti.train.learner import TorchLearner


def train(job: Job[TorchLearner]) -> None:
    """Train to the end of the recipe. Every rank makes the same steps; marked lines are collectives."""
    learner = job.learner
    job.begin()  # collective: the loss before the first step, and validation
    for batch in job.batches():
        loss = learner.forward_backward(batch, job.logs_after(batch.step + 1))  # collective: gradients are averaged
        learner.clip_gradients()
        learner.update_weights(job.lr)
        job.end_step(loss)
        if job.logs_after(job.step):
            job.log()  # collective: means over ranks
        if job.epoch_ends:
            job.finish_epoch()  # collective: the checkpoint where one is due, then validation
        if job.saves_now:
            job.save()  # collective: the checkpoint
    job.finish()  # collective where the run was stopped before its end: the checkpoint to resume from
