"""The end of a run whose loss is no number, with the step, the rank and the samples where it began."""

import math
from collections.abc import Sequence

import torch

from tutti.config.plan import Plan
from tutti.data.order import SampleOrder
from tutti.errors import DivergedError
from tutti.ranks.group import Group


def check_finite(loss: float, losses: Sequence[torch.Tensor], step: int, plan: Plan, seed: int, group: Group) -> None:
    """Stop when the loss is no number after `step` steps, the last of which had `losses`; every rank enters with it."""
    if math.isfinite(loss):
        return
    first = step - len(losses)
    bad = next((first + i for i, value in enumerate(losses) if not bool(torch.isfinite(value))), None)
    found = [(bad_step, rank) for rank, bad_step in enumerate(group.gather(bad)) if bad_step is not None]
    bad_step, rank = min(found, default=(step - 1, group.rank))
    ids = SampleOrder(plan, seed).rank_ids(bad_step, rank)
    shown = ", ".join(map(str, ids[:8].tolist())) + (", ..." if len(ids) > 8 else "")
    error = DivergedError(
        f"the loss is {loss} at step {bad_step + 1} (epoch {bad_step // plan.steps_per_epoch + 1}) on rank {rank}, "
        f"whose batch holds samples {shown}. Lower optim.lr, add warm-up (schedule.warmup_epochs=1) or "
        "optim.clip_norm=1.0, or look at those samples; earlier checkpoints are good."
    )
    error.agreed, error.rank, error.step = True, rank, bad_step + 1
    raise error
