"""The loop: everything a run does, in the order in which it happens."""

from tutti.train.job import Job


def train(job: Job) -> None:
    """Train to the end of the recipe. Every rank walks the same steps; marked lines are collectives."""
    job.rehearse()  # collective: the loss before the first step, and validation
    for batch in job.batches():
        job.forward_backward(batch)  # collective: gradients are averaged during the last backward pass
        job.learner.clip_gradients()
        job.update_weights()
        if job.logs_after(job.step):
            job.log()  # collective: means over ranks
        if job.epoch_ends:
            job.finish_epoch()  # collective: validation
        if job.saves_now:
            job.save()  # collective: the checkpoint
    job.hand_over()  # collective where the run was stopped before its end: the checkpoint that it goes on from
