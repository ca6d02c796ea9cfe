"""A run made ready on one rank, in any framework: its progress, and what happens between its steps."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, NoReturn

import torch

from tutti.checkpoint import store
from tutti.checkpoint.manifest import Manifest
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule
from tutti.data.loader import Loader, RankBatch, peek
from tutti.errors import CheckpointError, Interrupted, TrainingError
from tutti.ranks.device import uses_gpus
from tutti.ranks.group import Group, leave_last
from tutti.ranks.hang_detection import Monitor
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal
from tutti.runs.metrics import LineLog
from tutti.runs.step_parts import StepPart
from tutti.train.metrics import weighted_means
from tutti.train.progress import LearnerType, Patience, SkippedFiles, TrainingProgress, make_noise_log
from tutti.train.timing import Clock, ClosedWindow, Stragglers, combine, find_first_bad, phases_by_rank


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
        valid_sets: Mapping[str, Any],  # by what begins the names of their metrics
        monitor: Monitor,
    ) -> None:
        self.config, self.plan, self.schedule = config, plan, schedule
        self.group, self.folder, self.journal, self.monitor = group, folder, journal, monitor
        self.learner, self.loader, self.valid_sets = learner, loader, valid_sets
        self.step = 0
        self.results: dict[str, float] = {}
        self.samples_per_second: float | None = None
        self.validated: dict[str, float] = {}  # at the end of this epoch, by a loop of the user's own
        self.rates: list[float] = []  # samples a second in each log window
        self.clock = Clock(queues_on_gpu=learner.runs_ahead and uses_gpus(config.runtime))
        self.stragglers = Stragglers(group.hosts, config.runtime.straggler_factor, not uses_gpus(config.runtime))
        self._source: Any = None  # the loader's generator
        self._batches: Iterator[RankBatch] = iter(())
        self._order = loader.order.copy()  # the loader may be in another epoch already
        self._losses: list[Any] = []  # of the steps in the window, to name a bad one; not read before
        self._closed: ClosedWindow | None = None  # the window before it, while it is not written
        self._epoch_loss = [0.0, 0.0]  # sum and samples over all ranks
        self._epoch_seconds, self._epoch_steps = 0.0, 0
        self.later_steps: list[int] = []  # of checkpoints that the next save removes
        self._saved: Manifest | None = None  # the newest checkpoint
        self._save_problem = ""
        self._is_validated = True  # the epoch that ends with this step, if one does
        self._is_cut = False  # validation ended on this rank when the run was to stop
        self._at = monitor.enter if learner.reports_phases else lambda part, step: None
        log, _ = folder.shared_log(group.rank, group.world_size, group.placement.node_rank)
        self._skipped = SkippedFiles((loader.dataset, *valid_sets.values()), log, group, journal)
        writes_ledger = config.log.ledger and plan.layout.owns_samples(group.rank)
        self._ledger = LineLog(folder.ledger(group.rank)) if writes_ledger else None
        self._noise = make_noise_log(config, plan, folder, journal, learner, group.is_first)

    # What a loop calls, in the order in which it does.

    def begin(self) -> None:
        """Make a dry run of the first step, and write its loss if the run is new; every rank enters."""
        first = self.begin_loading()
        if first is None:
            return
        own = torch.tensor(self.learner.dry_run(first), dtype=torch.float64)
        loss, samples = self.group.sum(own).tolist()
        if self.step == 0:
            found = ({"train_loss": loss / samples} if samples else {}) | self.validate()
            self.journal.write("start", step=0, epoch=0, **found)

    def begin_loading(self) -> RankBatch | None:
        """Begin to load batches; the first of them, or None where the run has come to its end. Every rank enters."""
        if not self._is_validated:  # a stop came between the checkpoint of an epoch and its results
            self.finish_epoch()
        if self.has_reached or not self.goes_on():
            return None
        self._source = self.loader.steps(self.step)
        first, self._batches = peek(self._source)
        return first

    def batches(self) -> Iterator[RankBatch]:
        """This rank's batches to the end of the run; the time spent waiting for them is measured."""
        self.clock.start()
        timer = self.learner.timer
        timer.close(0)  # of the dry run
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
        return not self.has_reached and self.monitor.continues_after(self.step)

    def next_batch(self) -> RankBatch | None:
        """This rank's next batch, or None after the last."""
        began = self.clock.wait_began()
        batch = next(self._batches, None)
        self.clock.wait_ended(began)
        return batch

    def begin_step(self) -> None:
        """Write the samples of the next step to the ledger, and the files that were skipped for it to the log."""
        self._skipped.log()
        self.journal.collect(self.logs_after(self.step + 1))
        if self._ledger:
            ids = self._order.rank_ids(self.step, self.group.rank).tolist()
            self._ledger.write({"step": self.step + 1, "epoch": self._order.epoch_of(self.step) + 1, "ids": ids})

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.lr_at(self.step)

    def end_step(self, loss: Any) -> None:
        """Count a step, whose loss is not read, and write the window that ended before it; every rank enters."""
        self._losses.append(loss)
        self.step += 1
        self._write_closed()

    def log(self) -> None:
        """End a window with this step, and write its means, or leave that to the end of the next; every rank enters.

        Reading a window waits until a GPU has computed it. If the next step is queued before, the GPU has work then.
        """
        phases, totals = self.learner.timer.close(len(self._losses)), self.learner.take_totals()
        self._closed = ClosedWindow(self.step, self.epoch, self._losses, totals, phases, self.clock.close())
        self._losses = []
        if self._noise or not (self.learner.runs_ahead and self.next_step_only_trains):
            self._write_closed()

    def _write_closed(self) -> None:
        """Write the means of the window that has ended, if there is one; every rank enters."""
        window, self._closed = self._closed, None
        if window is None:
            return
        self._at(StepPart.LOGGING, self.step)
        count = len(self.learner.names)
        totals = self._sum(window.read(self.group.rank, self.group.world_size))
        values = weighted_means(self.learner.names, totals)
        self._check_finite(values["loss"], window.losses, window.step)
        steps = len(window.losses)
        self._epoch_loss = [self._epoch_loss[0] + totals[0], self._epoch_loss[1] + totals[count]]
        seconds, waited = window.lap()
        self._epoch_seconds += seconds
        self._epoch_steps += steps
        self.rates.append(steps * self.plan.global_batch / seconds)
        phases = self._compare_ranks(totals[2 * count :], window.step, steps, seconds)
        self.journal.write(
            "step",
            step=window.step,
            epoch=window.epoch,
            **values,
            lr=self.schedule.lr_at(window.step - 1),
            samples_per_second=self.rates[-1],
            seconds=seconds,
            **({"data_seconds": waited, "data_share": waited / seconds} | phases),
        )

    def finish_epoch(self) -> None:
        """Save where that is due, validate, and write the epoch's results; every rank enters.

        What is saved before validation says so: a run that resumes from it begins with the validation.
        """
        self._is_validated = False
        if self.saves_before_validation and not self.validated:
            self.save()
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
        self._note_patience()
        self._is_validated = True
        self._complete_checkpoint()

    def validate(self) -> dict[str, float]:
        """The validation metrics, where the run has validation data; every rank enters.

        A run that is to stop does so here: each rank ends after its batch, and the sum tells all that one has.
        """
        if not self.valid_sets:
            validated, self.validated = self.validated, {}
            return validated
        self._validation_goes_on()
        self.learner.combine_ranks(self.group)
        found: dict[str, float] = {}
        for suffix, weights in self.learner.evaluated():
            own = []
            with weights:
                for place, data in self.valid_sets.items():
                    self.journal.collect(True, f"valid_{place}", suffix)
                    own.append(self.learner.evaluate(data, self.group, self._validation_goes_on))
            *totals, cuts = self.group.sum(torch.cat([*own, torch.tensor([float(self._is_cut)])])).tolist()
            if cuts:
                self._stop(next(reason for reason in self.group.gather(self.monitor.stop_reason) if reason))
            self._skipped.log()
            for index, (place, data) in enumerate(self.valid_sets.items()):
                means = weighted_means(self.learner.names, totals[index * len(own[0]) :])
                self._skipped.check_some_left(means, len(data))
                found |= {f"valid_{place}{name}{suffix}": value for name, value in means.items()}
        return found

    def save(self) -> None:
        """Save a checkpoint; a disk that is full costs this checkpoint, not the run. Every rank enters."""
        if self._saved_step == self.step:
            return
        self._write_closed()
        self._at(StepPart.CHECKPOINT, self.step)
        began = time.monotonic()
        totals = self._sum([self.learner.totals()])  # before the pause: a GPU computes the steps that are queued
        self._check_finite(totals[0], self._losses, self.step)
        with self.clock.paused("checkpoints"):
            self.learner.combine_ranks(self.group)
            self.learner.put_totals(totals, self.group.is_first)
            self._skipped.count()
            try:
                self._saved = store.save(
                    self.folder.checkpoints,
                    self._manifest(totals),
                    self.learner.write,
                    self.group,
                    keep=self.config.checkpoint.keep,
                    is_best=self._is_best,
                )
                self.journal.commit()
            except CheckpointError as error:
                self._save_problem = str(error)
                self.journal.say(f"warning: {error}. Training continues; earlier checkpoints are untouched.")
        self._is_best = False
        self.learner.timer.paused()
        self.monitor.save_seconds = max(self.monitor.save_seconds, time.monotonic() - began)

    def finish(self) -> None:
        """End the run: an error where it was stopped early, or where its last checkpoint is not durable; every rank."""
        self.monitor.suspend()
        if not self.is_over:
            if self.monitor.stop_reason is not None:
                self._stop(self.monitor.stop_reason)
        elif self.saves_now and self._saved_step != self.step:
            error = CheckpointError(
                f"the run is trained to its end, step {self.step:,}, but {self._save_problem}. "
                f"{self._newest().capitalize()}. Free space, and resume with: "
                f"{self.config.resume_line(self.folder.path)}"
            )
            error.agreed, error.exit_code = True, TrainingError.exit_code
            raise error

    def _stop(self, reason: str) -> NoReturn:
        """Save, and raise an error that says how to resume; every rank enters."""
        self.save()
        self.group.barrier("the end of this part of the run")  # no rank ends while another still writes
        leave_last(self.group)
        where = "" if self._saved_step == self.step else f", but {self._newest()}"
        stopped = Interrupted(
            f"stopped {reason} after step {self.step:,} of {self.plan.total_steps:,}{where}. "
            f"Resume with: {self.config.resume_line(self.folder.path)}"
        )
        stopped.agreed = True
        raise stopped

    @property
    def _saved_step(self) -> int:
        return self._saved.step if self._saved else 0

    def _newest(self) -> str:
        return f"the newest checkpoint is of step {self._saved_step:,}" if self._saved else "there is no checkpoint"

    def _complete_checkpoint(self) -> None:
        """Write the results of an epoch into the checkpoint that was saved before its validation."""
        if self._saved is None or self._saved_step != self.step:
            return
        self._saved = replace(self._saved, progress=self._progress(self._saved.progress["window"]))
        try:
            if self.group.is_first:
                store.complete(self.folder.checkpoints, self._saved, self._is_best)
                self.journal.commit()
        except CheckpointError as error:  # the checkpoint is good, and its epoch is validated again by who resumes it
            self.journal.say(f"warning: {error}")
        self._is_best = False

    def restore(self, folder: Path, manifest: Manifest) -> None:
        """Continue from a verified checkpoint, on this number of ranks."""
        progress = manifest.progress
        self.learner.load(folder, progress)
        self.step, self._saved = manifest.step, manifest
        self.learner.put_totals(progress["window"], self.group.is_first)
        self._epoch_loss = list(progress["epoch_loss"])
        self._epoch_seconds, self._epoch_steps = progress.get("epoch_time", (0.0, 0))
        self._best = progress["best"]
        self._patience = Patience(**progress["patience"]) if "patience" in progress else None
        self.results = progress["results"]
        self._is_validated = not progress.get("unvalidated", False)
        self._skipped.names = list(progress.get("skipped", []))

    def end_loading(self) -> None:
        """End the processes that load samples; they may have ended with this rank, or be busy in another thread."""
        if self._source is not None:
            with suppress(RuntimeError, ValueError):
                self._source.close()

    def close(self, ended: str = "finished") -> None:
        """Close the files of this rank, and its loggers with how the run has ended."""
        self.journal.close(ended)
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
            progress=self._progress(window),
            order=self._order.name,
        )

    def _progress(self, window: list[float]) -> dict[str, Any]:
        return {
            "window": window,
            "epoch_loss": self._epoch_loss,
            "epoch_time": [self._epoch_seconds, self._epoch_steps],
            "best": self._best,
            **({} if self._patience is None else {"patience": asdict(self._patience)}),
            "results": self.results,
            **self.learner.progress(),
            "skipped": self._skipped.names,
            **({} if self._is_validated else {"unvalidated": True}),
        }

    def _sum(self, own: list[torch.Tensor]) -> list[float]:
        """What ranks have measured, added up over them; the noise scale is written. Every rank enters."""
        if self._noise:
            own.append(torch.tensor(self._noise.share(self.learner.take_squares()), dtype=torch.float64))
        sums = self.group.sum(torch.cat(own)).tolist()
        return self._noise.write(sums) if self._noise else sums

    def _compare_ranks(self, phases: list[float], last_step: int, steps: int, seconds: float) -> dict[str, float]:
        """Where the time of a window went, from the phases of all ranks; a slow one is named."""
        rows = phases_by_rank(phases)
        if not rows:
            return {}
        own = [row[StepPart.DATA] + row[StepPart.FORWARD] for row in rows]
        for line in self.stragglers.compare(own, steps, seconds, last_step):
            self.journal.say(line)
        return combine(rows, seconds)

    def _validation_goes_on(self) -> bool:
        self._at(StepPart.VALIDATION, self.step)
        self._is_cut = self.monitor.stop_reason is not None
        return not self._is_cut

    def _check_finite(self, loss: float, losses: Sequence[Any], last_step: int) -> None:
        """Stop where the loss of a window is not a finite number, and name its first step; every rank enters."""
        if math.isfinite(loss):
            return
        bad_step, rank = find_first_bad(losses, last_step, self.group)
        raise self._diverged(loss, bad_step + 1, rank, self._order.rank_ids(bad_step, rank).tolist())
