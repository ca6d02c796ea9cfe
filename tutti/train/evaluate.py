"""Validation: every sample once, whatever the number of ranks, with means weighted by samples."""

from collections.abc import Callable
from typing import Any

import torch

from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.loader import evaluation_batches
from tutti.ranks.group import Group
from tutti.train.learner import Learner
from tutti.train.meters import Meter, Metrics, count_samples


@torch.no_grad()
def evaluate(
    learner: Learner,
    metrics: Metrics,
    data: Any,
    config: RunConfig,
    plan: Plan,
    group: Group,
    device: torch.device,
    goes_on: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The means of loss and metrics over a dataset, with word after every batch; every rank enters."""
    learner.statistics.combine_ranks()
    learner.model.eval()
    meter = Meter(metrics, device)
    per_rank_batch = config.batch.eval or plan.micro_batch
    for inputs, targets in evaluation_batches(
        data, group.rank, group.world_size, per_rank_batch, device, config.data.workers, config.seed
    ):
        samples = count_samples(targets)
        outputs, loss = learner.predict(inputs, targets, is_full=samples == per_rank_batch)
        meter.add_loss(loss, samples)
        meter.add_metrics(outputs, targets, samples)
        goes_on()
    learner.model.train()
    return meter.means(meter.totals(group))
