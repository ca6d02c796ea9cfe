"""A run in Keras or TensorFlow made ready on one rank: where it stands, and what happens between its steps."""

import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from tutti.checkpoint.manifest import Manifest
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.data.loader import Loader
from tutti.data.order import SampleOrder
from tutti.errors import CheckpointError
from tutti.frameworks import checkpoint
from tutti.frameworks.feed import Feed, evaluation_feed
from tutti.frameworks.network import Network
from tutti.frameworks.profile import Profile
from tutti.optim.schedule import Schedule
from tutti.ranks.group import Group
from tutti.ranks.hang_detection import Watch
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal
from tutti.runs.metrics import LineLog
from tutti.runs.record import summarise_epochs
from tutti.runs.screen import show_number
from tutti.train.clock import Clock
from tutti.train.finite import check_finite
from tutti.train.skipped import SkippedFiles
from tutti.train.standing import Standing
from tutti.train.stragglers import Stragglers


class Job(Standing):
    """Everything a run needs on one rank; `step` counts the steps that are done."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        schedule: Schedule,
        group: Group,
        folder: RunFolder,
        journal: Journal,
        network: Network,
        loader: Loader,
        valid_data: Any,
        watch: Watch,
    ) -> None:
        self.watch = watch
        self.stragglers = Stragglers(group.hosts, config.runtime.straggler_factor)
        self.config, self.plan, self.schedule = config, plan, schedule
        self.group, self.folder, self.journal = group, folder, journal
        self.network, self.valid_data = network, valid_data
        self.step = 0
        self.results: dict[str, float] = {}
        self.samples_per_second: float | None = None
        self.rates: list[float] = []  # samples a second in each log window but the first, in which graphs are made
        self.clock = Clock()
        self.feed = Feed(loader, self.clock)
        self._dataset = loader.dataset
        self._order = SampleOrder(plan, config.seed)
        self._losses: list[Any] = []  # of the steps in the window, to name a bad one
        self._carried = torch.zeros(2 * len(network.names), dtype=torch.float64)  # of the window, from a checkpoint
        self._epoch_loss = [0.0, 0.0]  # sum and samples over all ranks
        self._epoch_seconds, self._epoch_steps = 0.0, 0
        self._saved_step = 0
        self._has_told = False
        self._profile = Profile(config.log.profile if group.is_first else None, folder.path / "profile")
        self._skipped = SkippedFiles((loader.dataset, valid_data), folder.log(group.rank), group, journal)
        self._ledger = LineLog(folder.ledger(group.rank)) if config.log.ledger else None

    # What the run is made of.

    @property
    def parameters(self) -> int:
        return self.network.parameters

    @property
    def gradient_bytes(self) -> int:
        """What ranks average in a step: float32."""
        return 4 * self.network.parameters

    @property
    def note(self) -> str | None:
        """What the training data has to say of itself."""
        return getattr(self._dataset, "note", None)

    # What a run calls, in the order in which it does.

    def begin(self) -> None:
        """Open the feed, and tell the loss before training if the run has not begun; every rank enters."""
        first = self.feed.open(self.step)
        if self.step == 0 and first is not None:
            own = torch.tensor([self.network.loss_of(first)])
            loss = float(self.group.sum(own)) / self.group.world_size
            self.journal.write("start", step=0, epoch=0, train_loss=loss, **self.validate())
        self.network.seed_dropout(self.config.seed, self.group.rank, self.step)
        self.network.clear()
        self.clock.start()

    def goes_on(self) -> bool:
        """Whether another step is to be made; all ranks get the same answer."""
        return not self.has_reached and self.watch.goes_on(self.step)

    def before_step(self) -> None:
        """Set the rate of the step that comes."""
        self.network.set_rate(self.schedule.lr_at(self.step))
        self._profile.before(self.step + 1)

    def after_step(self, loss: Any) -> None:
        """Count the step, and log where a window ends; `loss` is no number once one of the window is none."""
        if self._ledger:
            ids = self._order.rank_ids(self.step, self.group.rank)
            epoch = self._order.epoch_of(self.step)
            self._ledger.write({"step": self.step + 1, "epoch": epoch + 1, "ids": ids.tolist()})
        self.step += 1
        if self._profile.after(self.step):
            self.journal.say(f"trace of steps for TensorBoard: {self._profile.folder}")
        self._losses.append(loss)  # a tensor is not looked at before a mean is no number
        self._skipped.log()
        if self.logs_after(self.step):
            self._log()
        if not self.epoch_ends and self.saves_now:
            self.save()

    def finish_epoch(self) -> None:
        """Validate, tell the epoch and save where that is due; every rank enters."""
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
            ranks=self.group.world_size,
            **self._skipped.tell(),
        )
        self._epoch_loss = [0.0, 0.0]
        self._epoch_seconds, self._epoch_steps = 0.0, 0
        self._note_best()
        if self.saves_now:
            self.save()

    def validate(self) -> dict[str, float]:
        """The validation metrics over the samples of all ranks; every rank enters."""
        self.network.combine_ranks(self.group)
        per_rank_batch = self.config.batch.eval or self.plan.per_rank_batch
        feed = evaluation_feed(self.valid_data, self.group, per_rank_batch, self.config.data.workers, self.config.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # files that were passed over may make a batch fewer than promised
            totals = self.group.sum(self.network.evaluate(*feed)).tolist()
        means = self._means(totals)
        self._skipped.log()
        self._skipped.check_some_left(means, len(self.valid_data))
        return {f"valid_{name}": value for name, value in means.items()}

    def save(self) -> None:
        """Save from rank 0; a disk that is full costs this checkpoint, not the run."""
        if self._saved_step == self.step:
            return
        began = time.monotonic()
        with self.clock.paused("checkpoints"):
            self.network.combine_ranks(self.group)
            totals = self._totals()
            self._check_finite(totals[0])
            self._skipped.count()
            try:
                keep = self.config.checkpoint.keep
                manifest = self._manifest(totals)
                checkpoint.save(self.folder.checkpoints, manifest, self.network, self.group, keep, self._is_best)
                self._saved_step = self.step
            except CheckpointError as error:
                self.journal.say(f"warning: {error}. Training goes on; earlier checkpoints are untouched.")
        self._is_best = False
        self.watch.save_seconds = max(self.watch.save_seconds, time.monotonic() - began)

    def restore(self, folder: Path, manifest: Manifest) -> None:
        """Stand where a checkpoint was saved, on this number of ranks."""
        checkpoint.load(folder, self.network)
        progress = manifest.progress
        self.step = self._saved_step = manifest.step
        if self.group.is_first:
            self._carried = torch.tensor(progress["window"], dtype=torch.float64)
        self._epoch_loss = list(progress["epoch_loss"])
        self._best = progress["best"]
        self.results = progress["results"]
        self._skipped.names = list(progress.get("skipped", []))

    def end(self) -> None:
        """Leave the same statistics on all ranks, and tell how fast the run was; every rank enters."""
        if self.feed.error is not None:
            raise self.feed.error
        self.network.combine_ranks(self.group)
        if self.rates:
            speed = self.speed()
            self.journal.say(
                f"{speed['mean']:,.0f} images/s, spread {speed['spread']:,.0f}, over {speed['windows']} log window(s)"
            )
        if self.group.is_first:
            self._tell_best()

    def speed(self) -> dict[str, float]:
        """Samples a second over log windows: their mean, their standard deviation, and how many there are."""
        spread = stdev(self.rates) if len(self.rates) > 1 else 0.0
        return {"mean": mean(self.rates), "spread": spread, "windows": len(self.rates)}

    def close(self) -> None:
        """Close the files of this rank."""
        self.feed.close()
        self._profile.close()
        self.journal.close()
        if self._ledger:
            self._ledger.close()

    def _log(self) -> None:
        """Tell the means of the window that ends here; every rank enters."""
        totals = self._totals()
        values = self._means(totals)
        self._check_finite(values["loss"])
        steps = len(self._losses)
        self.network.clear()
        self._carried.zero_()
        self._losses.clear()
        self._epoch_loss[0] += totals[0]
        self._epoch_loss[1] += totals[len(self.network.names)]
        seconds, waited = self.clock.lap()
        self._epoch_seconds += seconds
        self._epoch_steps += steps
        rate = steps * self.plan.global_batch / seconds
        if self._has_told:
            self.rates.append(rate)
        self._has_told = True
        self.journal.write(
            "step",
            step=self.step,
            epoch=self.epoch,
            **values,
            lr=self.schedule.lr_at(self.step - 1),
            samples_per_second=rate,
            seconds=seconds,
            data_seconds=waited,
            data_share=waited / seconds,
        )

    def _tell_best(self) -> None:
        """The best value of each metric, and the mean time of an epoch."""
        summary = summarise_epochs(self.folder.metrics, self.group.world_size)
        best = ", ".join(
            f"best {name.replace('_', ' ')} {show_number(name, found['value'])} (epoch {found['epoch']})"
            for name, found in summary.get("best", {}).items()
        )
        if best and summary["seconds_per_epoch"]:
            self.journal.say(
                f"{best}; {summary['seconds_per_epoch']:.1f} s an epoch on {self.group.world_size} rank(s)"
            )

    def _totals(self) -> list[float]:
        """The sums of the window over all ranks, then the weights; every rank must enter."""
        return self.group.sum(self.network.totals() + self._carried).tolist()

    def _means(self, totals: Sequence[float]) -> dict[str, float]:
        names = self.network.names
        weighted = zip(names, totals[: len(names)], totals[len(names) :], strict=True)
        return {name: total / weight for name, total, weight in weighted if weight}

    def _manifest(self, window: list[float]) -> Manifest:
        return Manifest(
            recipe=self.config.recipe,
            step=self.step,
            seed=self.config.seed,
            global_batch=self.plan.global_batch,
            micro_batch=None,
            train_samples=self.plan.train_samples,
            ranks=self.group.world_size,
            model=checkpoint.model_shape(self.network.core),
            progress={
                "window": window,
                "epoch_loss": self._epoch_loss,
                "best": self._best,
                "results": self.results,
                "skipped": self._skipped.names,
            },
        )

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            losses = [torch.tensor(float(each)) for each in self._losses]
            check_finite(loss, losses, self.step, self.plan, self.config.seed, self.group)
