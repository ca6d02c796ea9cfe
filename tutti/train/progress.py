"""What a job drives and where it stands: the protocol of a learner, what is due at a step, and skipped files."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tutti import units
from tutti.config.check import is_reached
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schema import InitConfig
from tutti.data.loader import RankBatch
from tutti.errors import DataError, DivergedError
from tutti.ranks.group import Group
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal
from tutti.train.timing import StepTimer
from tutti.units import is_lower_better

if TYPE_CHECKING:
    from tutti.checkpoint.weights import StartingPoint
    from tutti.runs.noise_scale import NoiseLog

_NAMES_SHOWN = 3


class Learner(Protocol):
    """A model with its loss and its optimizer in some framework, as a job uses it.

    Totals are one tensor on the CPU in double precision: the sums of the loss and of each metric over the samples of
    this rank, then their weights. How a step is made is between a learner and its own loop.
    """

    names: tuple[str, ...]  # of the totals: loss, then the metrics
    timer: StepTimer
    reports_phases: bool  # whether its steps report their phases, which puts a deadline on each
    runs_ahead: bool  # whether a step is only queued when it ends, and computed later

    @property
    def model(self) -> Any:
        """The model that is saved, and that a finished run returns."""
        ...

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        ...

    @property
    def gradient_bytes(self) -> int:
        """The bytes that ranks average in a step, in however many passes."""
        ...

    def dry_run(self, batch: RankBatch) -> tuple[float, float]:
        """Compute a batch's loss without changing any state: its sum over this rank's samples, and their number.

        Both are 0 where a step cannot be made without its effect.
        """
        ...

    def totals(self) -> torch.Tensor:
        """The totals of the training steps since they were cleared; waits until a GPU has computed them."""
        ...

    def take_totals(self) -> Callable[[], torch.Tensor]:
        """Set the totals to zero; returns a function that gives what they were, and waits for a GPU."""
        ...

    def put_totals(self, totals: Sequence[float], is_first: bool) -> None:
        """Hold given totals on rank 0 and zeros elsewhere: the same sums over any number of ranks."""
        ...

    def take_squares(self) -> dict[int, list[float]]:
        """The squared norms of the gradient in the measured steps since they were taken, by step.

        The first is of the part of the batch that this rank has, or the mean over its micro-batches on one rank, the
        second of the whole batch; both without the scale of the loss, and before gradients are clipped.
        """
        ...

    @property
    def biases(self) -> tuple[str, ...]:
        """What in the model biases the gradient noise scale, as batch norm."""
        ...

    def evaluate(self, data: Any, group: Group, goes_on: Callable[[], bool]) -> torch.Tensor:
        """The totals of this rank's part of a dataset; ends early where `goes_on`, asked after every batch, says no."""
        ...

    def evaluated(self) -> Iterable[tuple[str, contextlib.AbstractContextManager[None]]]:
        """The weights that are evaluated, in use within a context, by what the names of their metrics end with."""
        ...

    def combine_ranks(self, group: Group) -> None:
        """Average over ranks the running statistics that each has from its own samples; every rank enters."""
        ...

    def shape(self) -> dict[str, str]:
        """The names, types and shapes of what the model saves."""
        ...

    def write(self, folder: Path, group: Group) -> Iterable[Path]:
        """Write the model and the optimizer durably; returns the files whose checksums this rank is to compute."""
        ...

    def load_weights(self, folder: Path, averages: bool = False) -> None:
        """Read the model alone from a verified checkpoint, or its averaged weights; every rank enters."""
        ...

    def start_from(self, init: InitConfig) -> "StartingPoint":
        """Begin with weights of another run or of a file, the same on every layout."""
        ...

    def load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Read a verified checkpoint, and what `progress` has added to its manifest."""
        ...

    def progress(self) -> dict[str, Any]:
        """What a manifest holds besides the files."""
        ...


LearnerType = TypeVar("LearnerType", bound=Learner)


def make_noise_log(
    config: RunConfig, plan: Plan, folder: RunFolder, journal: Journal, learner: Learner, is_first: bool
) -> "NoiseLog | None":
    """What writes the gradient noise scale, if the recipe has it measured."""
    if not config.log.noise_scale:
        return None
    from tutti.runs.noise_scale import NoiseLog

    return NoiseLog(plan, folder, journal, learner.biases, is_first)


@dataclass(frozen=True)
class Patience:
    """How long a validation metric has not improved; the same on all ranks, and saved with the run."""

    metric: str
    best: float | None = None
    waited: int = 0  # epochs since the best one

    def after(self, value: float, min_change: float) -> "Patience":
        """The patience after another epoch; a value that is no number is no improvement."""
        sign = -1 if is_lower_better(self.metric) else 1
        if math.isnan(value) or (self.best is not None and not sign * (value - self.best) > min_change):
            return replace(self, waited=self.waited + 1)
        return replace(self, best=value, waited=0)


class TrainingProgress:
    """Steps counted as epochs, log windows and checkpoints; `step` counts the steps that are done."""

    config: RunConfig
    plan: Plan
    step: int
    results: dict[str, float]  # of the last epoch
    starting_point: "StartingPoint | None" = None  # of a new run with `init`
    is_left: bool = False  # a loop of the user's own has ended before its last step
    _best: float | None = None
    _is_best: bool = False
    _patience: Patience | None = None

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
        """Whether the validation that ends this epoch ends the run; all ranks have the same results."""
        return self.epoch_ends and (self._is_at_target or self._is_impatient)

    @property
    def _is_at_target(self) -> bool:
        return self.config.stop_at is not None and is_reached(self.config.stop_at, self.results)

    @property
    def _is_impatient(self) -> bool:
        wish, found = self.config.stop_early, self._patience
        return wish is not None and found is not None and found.waited >= wish.patience

    @property
    def is_over(self) -> bool:
        """Whether the run is at its end."""
        return self.step == self.plan.total_steps or self.has_reached or self.is_left

    @property
    def ended_by(self) -> str:
        """The key of the recipe that ends the run, or `script`."""
        if self.has_reached:
            return "stop_at" if self._is_at_target else "stop_early"
        if self.is_left:
            return "script"
        return "epochs" if self.step == self.plan.steps_per_epoch * self.plan.epochs else "max_steps"

    def describe_stop(self) -> Iterator[str]:
        """For people: the value of `stop_at`, the patience of `stop_early` or the script, where that has ended it."""
        where = f"after epoch {self.epoch} of {self.plan.epochs}"
        if not self.has_reached:
            if self.is_left:
                yield f"stopped after step {self.step:,} of {self.plan.total_steps:,}: the script has left its loop"
            return
        if self._is_at_target:
            for metric, value in (self.config.stop_at or {}).items():
                found = f"{metric.replace('_', ' ')} {units.metric(metric, self.results[metric])}"
                yield f"stopped {where}: {found} has reached stop_at.{metric}={value:g}"
        elif (waited := self._patience) is not None:
            best = "" if waited.best is None else f" {units.metric(waited.metric, waited.best)}"
            since = f"is the best since epoch {self.epoch - waited.waited}"
            yield f"stopped {where}: {waited.metric.replace('_', ' ')}{best} {since} (stop_early.patience)"

    def logs_after(self, step: int) -> bool:
        """Whether a log window ends with a step: the first, every Nth, and the last of an epoch and of the run."""
        ends = step % self.plan.steps_per_epoch == 0 or step == self.plan.total_steps
        return step == 1 or ends or step % self.config.log.every_steps == 0

    @property
    def next_step_only_trains(self) -> bool:
        """Whether there is a next step, and no checkpoint, validation or line of the log is due before its end."""
        return not (self.is_over or self.epoch_ends or self.saves_now or self.logs_after(self.step + 1))

    @property
    def saves_before_validation(self) -> bool:
        """Whether a checkpoint is due whatever validation finds: every N steps or epochs, and at the last step."""
        wish = self.config.checkpoint
        if wish.every_steps and self.step % wish.every_steps == 0:
            return True
        if self.step == self.plan.total_steps and (wish.every_steps or wish.every_epochs):
            return True
        return self.epoch_ends and bool(wish.every_epochs and self.epoch % wish.every_epochs == 0)

    @property
    def saves_now(self) -> bool:
        """Whether a checkpoint is due: also after the best epoch, and where `stop_at` is reached."""
        wish = self.config.checkpoint
        if self.is_over and (wish.every_steps or wish.every_epochs):
            return True
        return self.saves_before_validation or (self.epoch_ends and self._is_best)

    def _diverged(self, loss: float, step: int, rank: int, ids: Sequence[int]) -> DivergedError:
        """The error of a loss that is not finite, at a step counted from 1."""
        shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
        error = DivergedError(
            f"the loss is {loss} at step {step} (epoch {(step - 1) // self.plan.steps_per_epoch + 1}) on rank "
            f"{rank}, whose batch holds samples {shown}. Lower optim.lr, add warm-up (schedule.warmup_epochs=1) or "
            "optim.clip_norm=1.0, or look at those samples; earlier checkpoints are good."
        )
        error.agreed, error.rank, error.step = True, rank, step
        return error

    def _note_patience(self) -> None:
        """Count an epoch without an improvement of the metric in `stop_early`; another metric begins anew."""
        wish = self.config.stop_early
        if wish is None:
            return
        known = self._patience
        known = known if known is not None and known.metric == wish.metric else Patience(wish.metric)
        self._patience = known.after(self.results.get(wish.metric, math.nan), wish.min_change)

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


class SkippedFiles:
    """The files that the datasets of a run have skipped; does nothing where no dataset keeps a list of them."""

    def __init__(self, datasets: Iterable[Any], log: Path, group: Group, journal: Journal) -> None:
        self.names: list[str] = []  # on any rank, as of the last count
        self._datasets = tuple(datasets)
        self._listed = any(getattr(data, "skipped", None) is not None for data in self._datasets)
        self._log = log
        self._group = group
        self._journal = journal
        self._here: set[str] = set()  # files in this rank's log

    def log(self) -> None:
        """Write the files that this rank has newly skipped into its log, and remove them from the lists."""
        if not self._listed:
            return
        for data in self._datasets:
            taken = getattr(data, "skipped", None)
            if not taken:
                continue
            # A name need not be UTF-8, but logs and checkpoints are.
            shown = {os.fsencode(name).decode(errors="backslashreplace") for name in taken}
            new = sorted(shown - self._here)
            taken.clear()
            self._here.update(new)
            with contextlib.suppress(OSError), open(self._log, "a") as log:
                log.writelines(f"skipped {name}: it cannot be decoded\n" for name in new)

    def count(self) -> None:
        """Gather the skipped files of all ranks; every rank enters."""
        if self._listed:
            found = self._group.gather(self._here.difference(self.names))
            self.names = sorted(set(self.names).union(*found))

    def report(self) -> dict[str, int]:
        """Print how many files have been skipped, and return the number for the record; every rank enters."""
        if not self._listed:
            return {}
        self.count()
        if self.names:
            shown = ", ".join(self.names[:_NAMES_SHOWN]) + (", ..." if len(self.names) > _NAMES_SHOWN else "")
            self._journal.say(f"{len(self.names):,} image(s) skipped so far, since they cannot be decoded: {shown}")
        return {"skipped_images": len(self.names)}

    def check_some_left(self, means: dict[str, float], samples: int) -> None:
        """Stop when no rank had a validation image to measure; every rank enters with the same means."""
        if means or not self._listed:
            return
        error = DataError(
            f"none of the {samples:,} validation images can be decoded: expected at least one. "
            "Their names are in the logs of the ranks; replace them."
        )
        error.agreed = True
        raise error
