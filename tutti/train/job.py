"""A run made ready on one rank: where it stands, and what happens between its steps."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tutti.checkpoint import store
from tutti.checkpoint.manifest import Manifest
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.loader import Loader, RankBatch
from tutti.errors import CheckpointError
from tutti.optim.schedule import Schedule
from tutti.ranks.group import Group
from tutti.ranks.hang_detection import Watch
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal
from tutti.runs.metrics import LineLog
from tutti.runs.step_parts import TIMED, StepPart
from tutti.train.clock import Clock
from tutti.train.evaluate import evaluate
from tutti.train.finite import check_finite
from tutti.train.learner import Learner
from tutti.train.meters import Meter, Metrics
from tutti.train.phases import combine
from tutti.train.skipped import SkippedFiles
from tutti.train.standing import Standing
from tutti.train.stragglers import Stragglers


@dataclass
class Job(Standing):
    """Everything a run needs on one rank; `step` counts the steps that are done."""

    config: RunConfig
    plan: Plan
    group: Group
    device: torch.device
    folder: RunFolder
    journal: Journal
    learner: Learner
    metrics: Metrics
    schedule: Schedule
    loader: Loader
    valid_data: Any
    watch: Watch
    step: int = 0

    def __post_init__(self) -> None:
        self.results: dict[str, float] = {}
        self.samples_per_second: float | None = None
        self._batches: Iterator[RankBatch] = iter(())
        self._window = Meter(self.metrics, self.device)
        self._losses: list[torch.Tensor] = []  # of the steps in the window, to name a bad one
        self._epoch_loss = [0.0, 0.0]  # sum and samples over all ranks
        self._epoch_seconds = 0.0
        self._epoch_steps = 0
        self._saved_step = 0
        datasets = (self.loader.dataset, self.valid_data)
        self._skipped = SkippedFiles(datasets, self.folder.log(self.group.rank), self.group, self.journal)
        self.clock = Clock()
        self.stragglers = Stragglers(self.group.hosts, self.config.runtime.straggler_factor)
        self._ledger = LineLog(self.folder.ledger(self.group.rank)) if self.config.log.ledger else None

    # What the run is made of.

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.learner.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """What ranks average in a step, in however many passes."""
        trained = [each for each in self.learner.model.parameters() if each.requires_grad]
        return sum(each.nbytes for each in trained) if self.config.ddp.communicate else 0

    @property
    def note(self) -> str | None:
        """What the training data has to say of itself."""
        return getattr(self.loader.dataset, "note", None)

    # What the loop calls, in the order in which it does.

    def rehearse(self) -> None:
        """Do the first step and keep nothing but its loss, which is told if the run has not begun.

        DDP settles its buckets in its first backward pass. Done aside, it leaves a resumed run to add up gradients
        in the same order as a run that was never stopped.
        """
        if self.has_reached:
            return
        self._batches = self.loader.steps(self.step)
        first = next(self._batches, None)
        if first is None:
            return
        meter = Meter(self.metrics, self.device)
        self.learner.model.train()
        with self.learner.unchanged():
            self.learner.forward_backward(first, meter, measure=False)
        loss = meter.means(meter.totals(self.group))["loss"]
        if self.step == 0:
            self.journal.write("start", step=0, epoch=0, train_loss=loss, **self.validate())
        self._batches = _chain(first, self._batches)

    def batches(self) -> Iterator[RankBatch]:
        """This rank's batches to the end of the run; the time spent waiting for them is measured."""
        self.clock.start()
        timer = self.learner.timer
        timer.lap(0)  # of the rehearsal
        while not self.has_reached and self.watch.goes_on(self.step):
            self.watch.at(StepPart.DATA, self.step + 1)
            timer.begin()
            began = self.clock.wait_began()
            batch = next(self._batches, None)
            self.clock.wait_ended(began)
            timer.ended(StepPart.DATA)
            if batch is None:
                return
            self._skipped.log()
            if self._ledger:
                self._ledger.write({"step": batch.step + 1, "epoch": batch.epoch + 1, "ids": batch.ids.tolist()})
            yield batch

    def forward_backward(self, batch: RankBatch) -> None:
        """Gradients of the global batch's mean loss."""
        measure = self.logs_after(batch.step + 1)
        self._losses.append(self.learner.forward_backward(batch, self._window, measure))

    def update_weights(self) -> None:
        """One step of the optimizer at the schedule's rate."""
        self.watch.at(StepPart.OPTIMIZER, self.step + 1)
        self.learner.update_weights(self.schedule.lr_at(self.step))
        self.step += 1

    def log(self) -> None:
        """Tell the means of the window that ends here; every rank enters."""
        self.watch.at(StepPart.LOGGING, self.step)
        totals = self._window.totals(self.group, self._own_phases)
        values = self._window.means(totals)
        self._check_finite(values["loss"])
        steps = len(self._losses)
        self._window.clear()
        self._losses.clear()
        self._epoch_loss[0] += totals[0]
        self._epoch_loss[1] += totals[len(self._window.names)]
        seconds, waited = self.clock.lap()
        self._epoch_seconds += seconds
        self._epoch_steps += steps
        phases = self._compare_ranks(totals[2 * len(self._window.names) :], steps, seconds)
        self.journal.write(
            "step",
            step=self.step,
            epoch=self.epoch,
            **values,
            lr=self.schedule.lr_at(self.step - 1),
            samples_per_second=steps * self.plan.global_batch / seconds,
            seconds=seconds,
            **({"data_seconds": waited, "data_share": waited / seconds} | phases),
        )

    def finish_epoch(self) -> None:
        """Validate and tell the epoch; every rank enters."""
        with self.clock.paused("validation"):
            self.results = {"train_loss": self._epoch_loss[0] / self._epoch_loss[1], **self.validate()}
        if self._epoch_seconds:
            self.samples_per_second = self._epoch_steps * self.plan.global_batch / self._epoch_seconds
        self.journal.write(
            "epoch",
            step=self.step,
            epoch=self.epoch,
            **self.results,
            samples_per_second=self.samples_per_second,
            seconds=self._epoch_seconds,
            **self._skipped.tell(),
        )
        self._epoch_loss = [0.0, 0.0]
        self._epoch_seconds, self._epoch_steps = 0.0, 0
        self._note_best()

    def validate(self) -> dict[str, float]:
        """The validation metrics, where the run has validation data; every rank enters."""
        if self.valid_data is None:
            return {}
        data = self.valid_data
        self.watch.at(StepPart.VALIDATION, self.step)
        means = evaluate(
            self.learner, self.metrics, data, self.config, self.plan, self.group, self.device, self._validates
        )
        self._skipped.log()
        self._skipped.check_some_left(means, len(self.valid_data))
        return {f"valid_{name}": value for name, value in means.items()}

    def save(self) -> None:
        """Save on all ranks; a disk that is full costs this checkpoint, not the run."""
        if self._saved_step == self.step:
            return
        self.watch.at(StepPart.CHECKPOINT, self.step)
        began = time.monotonic()
        with self.clock.paused("checkpoints"):
            self.learner.statistics.combine_ranks()
            totals = self._window.totals(self.group)
            self._check_finite(totals[0])
            self._window.put(totals, self.group.is_first)
            self._skipped.count()
            try:
                store.save(
                    self.folder.checkpoints,
                    self._manifest(totals),
                    self.learner.model,
                    self.learner.optimizer,
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

    def restore(self, folder: Path, manifest: Manifest) -> None:
        """Stand where a checkpoint was saved, on this number of ranks."""
        store.load(folder, self.learner.model, self.learner.optimizer)
        progress = manifest.progress
        self.step = self._saved_step = manifest.step
        self._window.put(progress["window"], self.group.is_first)
        self._epoch_loss = list(progress["epoch_loss"])
        self._best = progress["best"]
        self.results = progress["results"]
        self._skipped.names = list(progress.get("skipped", []))
        self.learner.scaler.load_state_dict(progress["scaler"])

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
            model=store.model_shape(self.learner.model),
            progress={
                "window": window,
                "epoch_loss": self._epoch_loss,
                "best": self._best,
                "results": self.results,
                "scaler": self.learner.scaler.state_dict(),
                "skipped": self._skipped.names,
            },
        )

    def _own_phases(self) -> list[float]:
        """This rank's seconds by phase since the last log, at its place in a row of zeros; nothing if none are kept."""
        own = list(self.learner.timer.lap(len(self._losses)).values())
        row = [0.0] * (len(own) * self.group.world_size)
        row[self.group.rank * len(own) : (self.group.rank + 1) * len(own)] = own
        return row

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

    def _validates(self) -> None:
        self.watch.at(StepPart.VALIDATION, self.step)

    def _check_finite(self, loss: float) -> None:
        check_finite(loss, self._losses, self.step, self.plan, self.config.seed, self.group)


def _chain(first: RankBatch, rest: Iterator[RankBatch]) -> Iterator[RankBatch]:
    yield first
    yield from rest
