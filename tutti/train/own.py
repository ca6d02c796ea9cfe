"""A training loop of the user's own: what recipes have, for a script that makes its steps itself."""

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.optim import LBFGS

from tutti.checkpoint.manifest import find_checkpoint
from tutti.config.layout import make_layout
from tutti.config.load import resolve_values
from tutti.config.plan import Plan
from tutti.config.run import LOOP, RunConfig
from tutti.data.loader import RankBatch, evaluation_batches
from tutti.data.order import same_number_size
from tutti.errors import ConfigError, TrainingError
from tutti.parallel.mesh import Mesh
from tutti.ranks.device import seed_pass
from tutti.ranks.environments import discover
from tutti.ranks.group import Group
from tutti.ranks.placement import Placement
from tutti.ranks.process import FOLDER_VARIABLE
from tutti.runs.folder import RunFolder, remove_folder
from tutti.runs.step_parts import StepPart
from tutti.train.job import Job
from tutti.train.metrics import as_number, check_names
from tutti.train.own_learner import OwnFramework, OwnLearner
from tutti.train.own_step import OwnStep, Stateful, broadcast_weights
from tutti.train.run import JoinedRun, begin_job, join_run

Model = TypeVar("Model", bound=nn.Module)

# Keys of recipes for which a script has its own code.
_MADE_BY_SCRIPTS = {
    "model": "the script makes its models, and gives them to run.model",
    "optim": "the script makes its optimizers, and lr gives the rate of run.lr",
    "loss": "the script computes its losses",
    "metrics": "the script computes them, and gives them to run.log or run.log_epoch",
    "step": "the loop of the script makes the steps",
}


class Run(OwnStep):
    """A run whose loop is in a script; see `start`."""

    def __init__(self, framework: OwnFramework, config: RunConfig, placement: Placement, resume: Path | None) -> None:
        super().__init__(config)
        self._framework, self._placement, self._resume = framework, placement, resume
        self._stack = ExitStack()
        self._joined: JoinedRun | None = None
        self._job: Job[OwnLearner] | None = None
        self._logged: torch.Tensor | None = None  # the loss of the step under way
        self._is_in_step = False

    def __enter__(self) -> Self:
        given = os.environ.get(FOLDER_VARIABLE) if self._resume is None else None
        folder = RunFolder(Path(given)) if given else None
        if folder is not None and folder.record.exists():  # of an earlier run of the script
            folder = None
        joined = join_run(self._framework, self.config, self._placement, folder, self._resume)
        self._stack.callback(self._discard_unused)
        self._joined = self._stack.enter_context(joined)
        torch.manual_seed(self.config.seed)  # the same first weights on every rank
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    # Where and who this rank is.

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._met.rank.device

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self._met.folder

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self._begun.step

    @property
    def lr(self) -> float:
        """The rate of the schedule for the step under way; without an `lr` a factor, which begins at 1."""
        return self._begun.lr

    # What the script has.

    def model(self, model: Model) -> Model:
        """The same model on the device of this rank, with the weights that rank 0 has; every rank enters.

        With `parallel.shard` the rank keeps its shards of them alone. Optimizers are made after it.
        """
        if not isinstance(model, nn.Module):
            raise TrainingError(f"run.model({model!r:.40}): expected a torch.nn.Module, as nn.Linear(2, 1) makes one.")
        model.to(self.device)
        broadcast_weights(model, self.ranks)
        self._models.append(model)
        if self._mesh.layout.uses_fsdp:
            from tutti.parallel.shard import ShardedModel

            self._sharded.append(ShardedModel(model, self._mesh.weights))
        return model

    def keep(self, **kept: Stateful) -> None:
        """Have checkpoints hold these models, optimizers and other objects with a state, under these names."""
        if self._job is not None:
            raise TrainingError("run.keep(...) after the first batch: expected it before the loop. Move it there.")
        for name, each in kept.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TrainingError(
                    f"run.keep({name}=...): {type(each).__name__} has no state_dict() and load_state_dict(): expected "
                    "a model, an optimizer, or an object that has both."
                )
        self._framework.kept |= kept

    # The loop.

    def batches(self) -> Iterator[Any]:
        """This rank's batch of every step that is left; logs, checkpoints and the end of an epoch come between them."""
        if not self._framework.kept:
            raise TrainingError("the loop begins with nothing to save: expected run.keep(model=..., optimizer=...).")
        if self._sharded:
            self._prepare_optimizers(self._framework.kept)
        job = self._stack.enter_context(begin_job(self._framework, self.config, self._met, self._resume))
        self._job = job
        self._stack.push(self._end_left_loop)
        job.begin_loading()
        for batch in job.batches():
            self._begin_step(batch)
            yield batch.micro_batches[0]
            self._end_step(job)
        job.finish()

    def log(self, loss: torch.Tensor | float, **values: torch.Tensor | float) -> None:
        """Log the values of this step, means over this rank's batch; written as means over ranks and log windows."""
        self._logged = self._begun.learner.add({"loss": loss, **values})

    def log_epoch(self, **values: float) -> None:
        """Write these values, the same on every rank, with the results of the epoch that ends with this step."""
        if not self.ends_epoch:
            raise TrainingError("run.log_epoch(...) within an epoch: expected it where run.ends_epoch is true.")
        check_names(values, "run.log_epoch")
        self._begun.validated |= {name: as_number(value, name, "run.log_epoch") for name, value in values.items()}

    def share(self, data: Any, batch: int | None = None) -> Iterator[Any]:
        """This rank's batches of other data, without augmentation; all ranks together see every sample once."""
        if batch is not None and batch < 1:
            raise TrainingError(f"run.share(data, batch={batch}): expected 1 or more samples of a rank at once.")
        size = batch or self._begun.plan.per_rank_batch
        if self._sharded:  # all ranks enter their forward passes
            size = same_number_size(len(data), self.ranks, size)
        workers = self.config.data.workers
        for each in evaluation_batches(data, self.rank, self.ranks, size, self.device, workers, self.config.seed):
            self._met.monitor.enter(StepPart.VALIDATION, self.step + 1)
            yield each

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        self._begun.journal.say(text)

    @property
    def _met(self) -> JoinedRun:
        if self._joined is None:
            raise TrainingError("the run is not open: expected `with tutti.start(...) as run:`.")
        return self._joined

    @property
    def _group(self) -> Group:
        return self._met.rank.group

    @property
    def _plan(self) -> Plan:
        return self._begun.plan

    @property
    def _begun(self) -> Job[OwnLearner]:
        if self._job is None:
            raise TrainingError("the loop has not begun: expected this within `for batch in run.batches():`.")
        return self._job

    @functools.cached_property
    def _mesh(self) -> Mesh:
        layout = make_layout(self.config.parallel, self.ranks, self._placement.local_size)
        return Mesh(layout, self.rank, self.device)

    def _prepare_optimizers(self, kept: Mapping[str, Stateful]) -> None:
        """Refuse optimizers that cannot step shards, and have the others find shards when they step."""
        models = [each for each in kept.values() if isinstance(each, nn.Module)]
        parameters = {each for model in models for each in model.parameters()}
        for name, each in kept.items():
            if not isinstance(each, torch.optim.Optimizer):
                continue
            if isinstance(each, LBFGS):
                raise TrainingError(
                    f"run.keep({name}=...): L-BFGS with parallel.shard={self.config.parallel.shard}: expected an "
                    "optimizer that updates every element alone, as Adam; L-BFGS joins all gradients into one vector, "
                    "which shards are not. Leave parallel.shard out."
                )
            stepped = {parameter for group in each.param_groups for parameter in group["params"]}
            if not stepped <= parameters:
                raise TrainingError(
                    f"run.keep({name}=...): {type(each).__name__} steps parameters that no kept model has, with "
                    f"parallel.shard={self.config.parallel.shard}: expected those in shards. Make optimizers with the "
                    "parameters of what run.model(...) returns, and keep these models."
                )
            for model in self._sharded:
                if not stepped.isdisjoint(model.model.parameters()):
                    each.register_step_pre_hook(lambda *_, model=model: model.before_step())

    def _begin_step(self, batch: RankBatch) -> None:
        self._logged, self._draws, self._is_in_step = None, 0, True
        seed_pass(self.device, self.config.seed, batch.step, self.rank)
        self._met.monitor.enter(StepPart.COMPUTE, batch.step + 1)

    def _end_step(self, job: Job[OwnLearner]) -> None:
        best, patient = self.config.checkpoint.best, self.config.stop_early
        asked = [f"valid_{best}"] if best else []
        asked += [*(self.config.stop_at or ()), *([patient.metric] if patient else [])]
        for name in asked if self.ends_epoch else []:
            if name not in job.validated:
                raise TrainingError(
                    f"the epoch of step {job.step + 1} ended without {name}, which checkpoint.best, stop_at or "
                    f"stop_early names: expected run.log_epoch({name}=...) where run.ends_epoch is true."
                )
        if self._logged is None:
            raise TrainingError(f"step {job.step + 1} ended without a loss: expected run.log(loss=...) in every step.")
        job.end_step(self._logged)
        self._is_in_step = False
        if job.logs_after(job.step) or job.is_left:
            job.log()
        if job.epoch_ends:
            job.finish_epoch()
        if job.saves_now:
            job.save()

    def _end_left_loop(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish a run whose loop the script has left: a step that was logged counts. Every rank enters."""
        job = self._begun
        if kind is not None or not self._is_in_step:
            return
        job.is_left = True
        if self._logged is not None:
            self._end_step(job)
        elif job.saves_now:
            job.save()
        job.finish()

    def _discard_unused(self) -> None:
        """Leave no folder of a run whose loop never began."""
        if self._joined is None or self._job is not None or self._placement.rank > 0:
            return
        folder = self._joined.folder
        if not any(each.is_file() for each in folder.path.rglob("*")):  # a launcher has its logs there
            remove_folder(folder)


def start(
    name: str,
    data: Any,
    *,
    batch: int,
    epochs: int,
    lr: float = 1.0,
    resume: str | Path | None = None,
    workers: int = 0,
    **recipe: Any,
) -> Run:
    """A run for a training loop in a script, as a rank of whatever started it: `with tutti.start(...) as run:`.

    `batch` is the global batch, `resume` a run folder, a checkpoint or "latest", and `workers` the processes of a rank
    that read samples; `recipe` has other keys of recipes.
    """
    script = Path(sys.argv[0]).stem or "__main__"
    values = {
        "recipe": name,
        "data": {"name": f"{type(data).__module__}:{type(data).__qualname__}", "workers": workers},
        "model": {"name": script + LOOP},
        "optim": {"name": script + LOOP, "lr": lr},
        "metrics": [],
        "batch": {"global": batch},
        "epochs": epochs,
    }
    for key, instead in _MADE_BY_SCRIPTS.items():
        if key in recipe:
            raise ConfigError(f"tutti.start({key}=...): expected other keys of a recipe; {instead}. Leave {key} out.")
    config = resolve_values(values | recipe, "start()")
    checkpoint = None
    if resume is not None:
        checkpoint = find_checkpoint(str(resume), config.out, config.recipe, in_script=True)
    return Run(OwnFramework(data), config, discover(os.environ), checkpoint)
