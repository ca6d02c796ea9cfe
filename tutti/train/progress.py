"""The progress of a run, and what is due at a step; the same in every framework."""

from collections.abc import Iterator

from tutti import units
from tutti.config.check import is_reached
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.units import is_lower_better


class TrainingProgress:
    """Steps counted as epochs, log windows and checkpoints; `step` counts the steps that are done."""

    config: RunConfig
    plan: Plan
    step: int
    results: dict[str, float]  # of the last epoch
    _best: float | None = None
    _is_best: bool = False

    @property
    def epoch(self) -> int:
        """The epoch of the last finished step, counted from 1."""
        return (self.step - 1) // self.plan.steps_per_epoch + 1

    @property
    def epoch_ends(self) -> bool:
        """Whether the last finished step is the last of an epoch."""
        return self.step % self.plan.steps_per_epoch == 0

    @property
    def has_reached(self) -> bool:
        """Whether the validation that ends this epoch has reached `stop_at`; all ranks have the same results."""
        target = self.config.stop_at
        return target is not None and self.epoch_ends and is_reached(target, self.results)

    @property
    def is_over(self) -> bool:
        """Whether the run is at its end."""
        return self.step == self.plan.total_steps or self.has_reached

    @property
    def ended_by(self) -> str:
        """The key of the recipe that ends the run."""
        if self.has_reached:
            return "stop_at"
        return "epochs" if self.step == self.plan.steps_per_epoch * self.plan.epochs else "max_steps"

    def describe_stop(self) -> Iterator[str]:
        """For people: the value of `stop_at` that the run has reached, where that has ended it."""
        if self.has_reached:
            for metric, value in (self.config.stop_at or {}).items():
                found = f"{metric.replace('_', ' ')} {units.metric(metric, self.results[metric])}"
                where = f"after epoch {self.epoch} of {self.plan.epochs}"
                yield f"stopped {where}: {found} has reached stop_at.{metric}={value:g}"

    def logs_after(self, step: int) -> bool:
        """Whether a log window ends with a step: the first, every Nth, and the last of an epoch and of the run."""
        ends = step % self.plan.steps_per_epoch == 0 or step == self.plan.total_steps
        return step == 1 or ends or step % self.config.log.every_steps == 0

    @property
    def saves_now(self) -> bool:
        """Whether a checkpoint is due: every N steps, every N epochs, after the best epoch, and at the end."""
        wish = self.config.checkpoint
        if wish.every_steps and self.step % wish.every_steps == 0:
            return True
        if self.is_over and (wish.every_steps or wish.every_epochs):
            return True
        return self.epoch_ends and (self._is_best or bool(wish.every_epochs and self.epoch % wish.every_epochs == 0))

    def _note_best(self) -> None:
        """Remember whether this epoch has the best value of the metric in `checkpoint.best`."""
        name = self.config.checkpoint.best
        if name is None:
            return
        value = self.results[f"valid_{name}"]
        sign = -1 if is_lower_better(name) else 1
        self._is_best = self._best is None or sign * value > sign * self._best
        if self._is_best:
            self._best = value
