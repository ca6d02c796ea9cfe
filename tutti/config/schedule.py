"""The learning rate as a pure function of the step: scaled with the batch, warmed up, decayed."""

import math
from dataclasses import dataclass

from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schema import ScheduleConfig
from tutti.errors import ConfigError
from tutti.units import count


@dataclass(frozen=True)
class Schedule:
    """The rate at every step of a run; `decay` reaches `end_lr` at the last step."""

    unscaled_lr: float
    peak_lr: float
    warmup_steps: int
    warmup_from_zero: bool
    warmup_holds: bool
    decay: str
    end_lr: float
    total_steps: int
    milestones: tuple[int, ...] = ()  # in steps
    factor: float = 0.1
    notes: tuple[str, ...] = ()  # what the schedule changes of the recipe

    def lr_at(self, step: int) -> float:
        """The rate used for the given step, counted from 0."""
        if step < self.warmup_steps:
            if self.warmup_holds:
                return self.unscaled_lr
            if self.warmup_from_zero:
                return self.peak_lr * (step + 1) / self.warmup_steps
            return self.unscaled_lr + (self.peak_lr - self.unscaled_lr) * step / self.warmup_steps
        if self.decay == "constant":
            return self.peak_lr
        if self.decay == "step":
            return self.peak_lr * self.factor ** sum(step >= milestone for milestone in self.milestones)
        last = self.total_steps - 1
        progress = (step - self.warmup_steps) / max(1, last - self.warmup_steps)
        if step >= last:
            progress = 1.0
        share = 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress
        return self.end_lr + (self.peak_lr - self.end_lr) * share


def scale_factor(rule: str, global_batch: int, base_batch: int) -> float:
    """The factor of a scaling rule for a batch that grows from base to global."""
    ratio = global_batch / base_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def make_schedule(config: RunConfig, plan: Plan) -> Schedule:
    """The schedule of a recipe for a plan of steps."""
    given = config.schedule
    base = config.batch.base or plan.global_batch
    if given.scaling != "none" and config.batch.base is None:
        raise ConfigError(
            f"schedule.scaling={given.scaling!r} needs batch.base, the global batch that optim.lr was chosen for. "
            "Set batch.base=..., or schedule.scaling=none."
        )
    if given.warmup_steps is not None:
        warmup = given.warmup_steps
    else:
        warmup = _in_steps(given.warmup_epochs or 0, plan)
    notes = ()
    if _is_too_long(given, plan, warmup):
        asked, run, epochs = _lengths(given, plan, warmup)
        if not given.shorten_warmup:
            raise ConfigError(
                f"a warm-up of {asked} is longer than the whole run of {run}{epochs}. Shorten schedule.warmup_*, or "
                "raise epochs."
            )
        warmup = plan.total_steps
        notes = (f"warm-up shortened to the {run} of this run: the recipe has {asked}, for more epochs",)
    peak = config.optim.lr * scale_factor(given.scaling, plan.global_batch, base)
    highest = math.prod([max(peak, config.optim.lr, 1.0), *(max(given.factor, 1.0) for _ in given.milestones)])
    if not math.isfinite(highest * min(plan.total_steps, 1e12)):
        raise ConfigError(
            f"optim.lr={config.optim.lr:g}, scaled to {peak:g}, with schedule.factor={given.factor:g}: expected finite "
            "rates at all steps. Set a smaller optim.lr, or a smaller schedule.factor."
        )
    if given.decay in ("cosine", "linear") and given.end_lr > peak:
        raise ConfigError(
            f"schedule.end_lr={given.end_lr:g} is above the rate of {peak:g} that the decay starts from. "
            f"Set schedule.end_lr to less than {peak:g}."
        )
    return Schedule(
        unscaled_lr=config.optim.lr,
        peak_lr=peak,
        warmup_steps=warmup,
        warmup_from_zero=given.warmup_from == "zero",
        warmup_holds=given.warmup == "hold",
        decay=given.decay,
        end_lr=given.end_lr,
        total_steps=plan.total_steps,
        milestones=tuple(_in_steps(epoch, plan) for epoch in given.milestones),
        factor=given.factor,
        notes=notes,
    )


def _is_too_long(given: ScheduleConfig, plan: Plan, warmup: int) -> bool:
    """Returns whether a warm-up is longer than the run; before samples are counted, only equal units can tell."""
    if plan.is_counted or given.warmup_steps is not None:
        return warmup > plan.total_steps
    return (given.warmup_epochs or 0) > plan.epochs


def _lengths(given: ScheduleConfig, plan: Plan, warmup: int) -> tuple[str, str, str]:
    """The lengths of a warm-up and of a run that is shorter, and the epochs of the run where steps are given."""
    if not plan.is_counted and given.warmup_epochs is not None:
        return count(given.warmup_epochs, "epoch"), count(plan.epochs, "epoch"), ""
    epochs = f" ({count(plan.epochs, 'epoch')} of {count(plan.steps_per_epoch)})" if plan.is_counted else ""
    return count(warmup, "step"), count(plan.total_steps, "step"), epochs


def _in_steps(epochs: float, plan: Plan) -> int:
    """Convert epochs to steps; very large values stay finite."""
    return round(min(epochs, 1e12) * plan.steps_per_epoch)
