"""A run made ready on one rank, in any framework: its progress, and what happens between its steps."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from tutti.checkpoint import store
from tutti.checkpoint.manifest import Manifest
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule
from tutti.data.loader import Loader, RankBatch
from tutti.data.order import SampleOrder
from tutti.errors import CheckpointError, DivergedError, Interrupted
from tutti.ranks.group import Group
from tutti.ranks.hang_detection import Watch
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal
from tutti.runs.metrics import LineLog
from tutti.runs.step_parts import TIMED, StepPart
from tutti.train.metrics import weighted_means
from tutti.train.progress import TrainingProgress
from tutti.train.skipped import SkippedFiles
from tutti.train.timing import Clock, StepTimer, Stragglers, combine


class Learner(Protocol):
    """A model with its loss and its optimizer in some framework, as a job uses it.

    Totals are one tensor on the CPU in double precision: the sums of the loss and of each metric over the samples of
    this rank, then their weights. How a step is made is between a learner and its own loop.
    """

    names: tuple[str, ...]  # of the totals: loss, then the metrics
    timer: StepTimer
    reports_phases: bool  # whether its steps report their phases, which puts a deadline on each

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
        """Compute a batch's loss without changing any state: its sum over this rank's samples, and their number."""
        ...

    def totals(self) -> torch.Tensor:
        """The totals of the training steps since they were cleared; waits until a GPU has computed them."""
        ...

    def clear_totals(self) -> None:
        """Set the totals to zero."""
        ...

    def put_totals(self, totals: Sequence[float], is_first: bool) -> None:
        """Hold given totals on rank 0 and zeros elsewhere: the same sums over any number of ranks."""
        ...

    def evaluate(self, data: Any, group: Group, progressed: Callable[[], None]) -> torch.Tensor:
        """The totals of this rank's part of a dataset; calls `progressed` after every batch where it can."""
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

    def load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Read a verified checkpoint, and what `progress` has added to its manifest."""
        ...

    def progress(self) -> dict[str, Any]:
        """What a manifest holds besides the files."""
        ...


LearnerType = TypeVar("LearnerType", bound=Learner)


class Job(TrainingProgress, Generic[LearnerType]):
    """Everything a run needs on one rank; `step` counts the steps that are done."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        schedule: Schedule,
        group: Group,
        folder: RunFolder,
        journal: Journal,
        learner: LearnerType,
        loader: Loader,
        valid_data: Any,
        watch: Watch,
    ) -> None:
        self.config, self.plan, self.schedule = config, plan, schedule
        self.group, self.folder, self.journal, self.watch = group, folder, journal, watch
        self.learner, self.loader, self.valid_data = learner, loader, valid_data
        self.step = 0
        self.results: dict[str, float] = {}
        self.samples_per_second: float | None = None
        self.rates: list[float] = []  # samples a second in each log window
        self.clock = Clock()
        self.stragglers = Stragglers(group.hosts, config.runtime.straggler_factor)
        self._source: Any = None  # the loader's generator
        self._batches: Iterator[RankBatch] = iter(())
        self._order = SampleOrder(plan, config.seed)
        self._losses: list[Any] = []  # of the steps in the window, to name a bad one; not read before
        self._epoch_loss = [0.0, 0.0]  # sum and samples over all ranks
        self._epoch_seconds, self._epoch_steps = 0.0, 0
        self._saved_step = 0
        self._at = watch.at if learner.reports_phases else _report_nothing
        self._skipped = SkippedFiles((loader.dataset, valid_data), folder.log(group.rank), group, journal)
        self._ledger = LineLog(folder.ledger(group.rank)) if config.log.ledger else None

    # What a loop calls, in the order in which it does.

    def begin(self) -> None:
        """Make a dry run of the first step, and write its loss if the run is new; every rank enters."""
        if self.has_reached:
            return
        self._source = self.loader.steps(self.step)
        first, self._batches = peek(self._source)
        if first is None:
            return
        own = torch.tensor(self.learner.dry_run(first), dtype=torch.float64)
        loss, samples = self.group.sum(own).tolist()
        if self.step == 0:
            self.journal.write("start", step=0, epoch=0, train_loss=loss / samples, **self.validate())

    def batches(self) -> Iterator[RankBatch]:
        """This rank's batches to the end of the run; the time spent waiting for them is measured."""
        self.clock.start()
        timer = self.learner.timer
        timer.lap(0)  # of the dry run
        while self.goes_on():
            self._at(StepPart.DATA, self.step + 1)
            timer.begin()
            batch = self.next_batch()
            timer.ended(StepPart.DATA)
            if batch is None:
                return
            self.begin_step()
            yield batch

    def goes_on(self) -> bool:
        """Whether another step is to be made; all ranks get the same answer."""
        return not self.has_reached and self.watch.goes_on(self.step)

    def next_batch(self) -> RankBatch | None:
        """This rank's next batch, or None after the last."""
        began = self.clock.wait_began()
        batch = next(self._batches, None)
        self.clock.wait_ended(began)
        return batch

    def begin_step(self) -> None:
        """Write the samples of the next step to the ledger, and the files that were skipped for it to the log."""
        self._skipped.log()
        if self._ledger:
            ids = self._order.rank_ids(self.step, self.group.rank)
            epoch = self._order.epoch_of(self.step)
            self._ledger.write({"step": self.step + 1, "epoch": epoch + 1, "ids": ids.tolist()})

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.lr_at(self.step)

    def end_step(self, loss: Any) -> None:
        """Count a step; its loss, on whatever device, is not read."""
        self._losses.append(loss)
        self.step += 1

    def log(self) -> None:
        """Write the means of the window that ends here; every rank enters."""
        self._at(StepPart.LOGGING, self.step)
        count = len(self.learner.names)
        own = self.learner.totals()
        totals = self.group.sum(torch.cat([own, self._own_phases()])).tolist()
        values = weighted_means(self.learner.names, totals)
        self._check_finite(values["loss"])
        steps = len(self._losses)
        self.learner.clear_totals()
        self._losses.clear()
        self._epoch_loss[0] += totals[0]
        self._epoch_loss[1] += totals[count]
        seconds, waited = self.clock.lap()
        self._epoch_seconds += seconds
        self._epoch_steps += steps
        self.rates.append(steps * self.plan.global_batch / seconds)
        phases = self._compare_ranks(totals[2 * count :], steps, seconds)
        self.journal.write(
            "step",
            step=self.step,
            epoch=self.epoch,
            **values,
            lr=self.schedule.lr_at(self.step - 1),
            samples_per_second=self.rates[-1],
            seconds=seconds,
            **({"data_seconds": waited, "data_share": waited / seconds} | phases),
        )

    def finish_epoch(self) -> None:
        """Validate and write the epoch's results; every rank enters."""
        with self.clock.paused("validation"):
            self.results = {"train_loss": self._epoch_loss[0] / self._epoch_loss[1], **self.validate()}
        if self._epoch_seconds:
            self.samples_per_second = self._epoch_steps * self.plan.global_batch / self._epoch_seconds
        ranks = {} if self.config.framework == "torch" else {"ranks": self.group.world_size}
        self.journal.write(
            "epoch",
            step=self.step,
            epoch=self.epoch,
            **self.results,
            samples_per_second=self.samples_per_second,
            seconds=self._epoch_seconds,
            **ranks,
            **self._skipped.report(),
        )
        self._epoch_loss = [0.0, 0.0]
        self._epoch_seconds, self._epoch_steps = 0.0, 0
        self._note_best()

    def validate(self) -> dict[str, float]:
        """The validation metrics, where the run has validation data; every rank enters."""
        if self.valid_data is None:
            return {}
        self._mark_validation()
        self.learner.combine_ranks(self.group)
        totals = self.group.sum(self.learner.evaluate(self.valid_data, self.group, self._mark_validation)).tolist()
        means = weighted_means(self.learner.names, totals)
        self._skipped.log()
        self._skipped.check_some_left(means, len(self.valid_data))
        return {f"valid_{name}": value for name, value in means.items()}

    def save(self) -> None:
        """Save a checkpoint; a disk that is full costs this checkpoint, not the run. Every rank enters."""
        if self._saved_step == self.step:
            return
        self._at(StepPart.CHECKPOINT, self.step)
        began = time.monotonic()
        with self.clock.paused("checkpoints"):
            self.learner.combine_ranks(self.group)
            totals = self.group.sum(self.learner.totals()).tolist()
            self._check_finite(totals[0])
            self.learner.put_totals(totals, self.group.is_first)
            self._skipped.count()
            try:
                store.save(
                    self.folder.checkpoints,
                    self._manifest(totals),
                    self.learner.write,
                    self.group,
                    keep=self.config.checkpoint.keep,
                    is_best=self._is_best,
                )
                self._saved_step = self.step
            except CheckpointError as error:
                self.journal.say(f"warning: {error}. Training goes on; earlier checkpoints are untouched.")
        self._is_best = False
        self.learner.timer.paused()
        self.watch.save_seconds = max(self.watch.save_seconds, time.monotonic() - began)

    def save_if_stopped(self) -> None:
        """Save a run that was stopped before its end, and raise an error that says how to resume; every rank enters."""
        self.watch.rests()
        if self.watch.stop_reason is None or self.is_over:
            return
        self.save()
        self.group.barrier("the end of this part of the run")  # no rank ends while another still writes
        where = "" if self._saved_step == self.step else f", but the newest checkpoint is of step {self._saved_step:,}"
        where = where if self._saved_step else ", but there is no checkpoint"
        stopped = Interrupted(
            f"stopped {self.watch.stop_reason} after step {self.step:,} of {self.plan.total_steps:,}{where}. "
            f"Resume with: tutti train {self.folder.path}"
        )
        stopped.agreed = True
        raise stopped

    def restore(self, folder: Path, manifest: Manifest) -> None:
        """Continue from a verified checkpoint, on this number of ranks."""
        progress = manifest.progress
        self.learner.load(folder, progress)
        self.step = self._saved_step = manifest.step
        self.learner.put_totals(progress["window"], self.group.is_first)
        self._epoch_loss = list(progress["epoch_loss"])
        self._best = progress["best"]
        self.results = progress["results"]
        self._skipped.names = list(progress.get("skipped", []))

    def end_loading(self) -> None:
        """End the processes that load samples; they may have ended with this rank, or be busy in another thread."""
        if self._source is not None:
            with suppress(RuntimeError, ValueError):
                self._source.close()

    def close(self) -> None:
        """Close the files of this rank."""
        self.journal.close()
        if self._ledger:
            self._ledger.close()

    def _manifest(self, window: list[float]) -> Manifest:
        return Manifest(
            recipe=self.config.recipe,
            step=self.step,
            seed=self.config.seed,
            global_batch=self.plan.global_batch,
            micro_batch=self.config.batch.micro,
            train_samples=self.plan.train_samples,
            ranks=self.group.world_size,
            model=self.learner.shape(),
            progress={
                "window": window,
                "epoch_loss": self._epoch_loss,
                "best": self._best,
                "results": self.results,
                **self.learner.progress(),
                "skipped": self._skipped.names,
            },
        )

    def _own_phases(self) -> torch.Tensor:
        """This rank's seconds by phase since the last log, at its place in a row of zeros; empty if none are kept."""
        own = list(self.learner.timer.lap(len(self._losses)).values())
        row = [0.0] * (len(own) * self.group.world_size)
        row[self.group.rank * len(own) : (self.group.rank + 1) * len(own)] = own
        return torch.tensor(row, dtype=torch.float64)

    def _compare_ranks(self, phases: list[float], steps: int, seconds: float) -> dict[str, float]:
        """Where the time of a window went, from the phases of all ranks; a slow one is named."""
        if not phases:
            return {}
        cuts = range(0, len(phases), len(TIMED))
        rows = [dict(zip(TIMED, phases[cut : cut + len(TIMED)], strict=True)) for cut in cuts]
        own = [row[StepPart.DATA] + row[StepPart.FORWARD] for row in rows]
        for line in self.stragglers.compare(own, steps, seconds, self.step):
            self.journal.say(line)
        return combine(rows, seconds)

    def _mark_validation(self) -> None:
        self._at(StepPart.VALIDATION, self.step)

    def _check_finite(self, loss: float) -> None:
        """Stop where the loss of the window is not a finite number, and name its first step; every rank enters."""
        if math.isfinite(loss):
            return
        first = self.step - len(self._losses)
        bad = next((first + i for i, value in enumerate(self._losses) if not math.isfinite(float(value))), None)
        found = [(step, rank) for rank, step in enumerate(self.group.gather(bad)) if step is not None]
        bad_step, rank = min(found, default=(self.step - 1, self.group.rank))
        ids = self._order.rank_ids(bad_step, rank)
        shown = ", ".join(map(str, ids[:8].tolist())) + (", ..." if len(ids) > 8 else "")
        error = DivergedError(
            f"the loss is {loss} at step {bad_step + 1} (epoch {bad_step // self.plan.steps_per_epoch + 1}) on rank "
            f"{rank}, whose batch holds samples {shown}. Lower optim.lr, add warm-up (schedule.warmup_epochs=1) or "
            "optim.clip_norm=1.0, or look at those samples; earlier checkpoints are good."
        )
        error.agreed, error.rank, error.step = True, rank, bad_step + 1
        raise error


def peek(batches: Iterator[RankBatch]) -> tuple[RankBatch | None, Iterator[RankBatch]]:
    """The first batch, and all batches with that one among them."""
    first = next(batches, None)
    return first, batches if first is None else chain((first,), batches)


def _report_nothing(part: StepPart, step: int) -> None: ...
