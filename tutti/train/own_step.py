"""A training step of the user's own: what it has of its run, and the learner of a recipe with such a step."""

import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from tutti.checkpoint import store
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule
from tutti.data.loader import RankBatch
from tutti.errors import CheckpointError, TrainingError
from tutti.parallel.averaging import GradientAverage
from tutti.parallel.mesh import Mesh
from tutti.ranks.device import mix
from tutti.ranks.group import Group
from tutti.runs.files import write_durably
from tutti.runs.step_parts import StepPart
from tutti.train.learner import Silence, TorchLearner
from tutti.train.metrics import Metrics, StepValues, as_number, taken
from tutti.train.timing import NoTimer

if TYPE_CHECKING:
    from tutti.parallel.shard import ShardedModel

_DRAWN = 0x647261776E  # keeps the numbers of `OwnStep.normal` apart from those of dropout
_OPTIMIZERS = "optimizers.pt"  # of a checkpoint of a recipe with a step of the user's own: their states by name


class Stateful(Protocol):
    """What a checkpoint can hold: models, optimizers, schedulers, objects of one's own."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class OwnStep:
    """What a step of the user's own has: where its run stands, averages over ranks, and random numbers by sample."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._averages: dict[tuple[int, ...], GradientAverage] = {}
        self._models: list[nn.Module] = []  # of the run
        self._sharded: list[ShardedModel] = []  # those of them whose parameters ranks share
        self._draws = 0  # in the step under way

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._group.world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """The number of finished steps."""
        raise NotImplementedError

    @property
    def lr(self) -> float:
        """The rate of the schedule for the step under way."""
        raise NotImplementedError

    @property
    def ends_epoch(self) -> bool:
        """Whether the step under way is the last of its epoch."""
        return (self.step + 1) % self._plan.steps_per_epoch == 0

    def backward(self, loss: torch.Tensor, *models: nn.Module) -> torch.Tensor:
        """Compute the gradients of a loss, and average those of these models over ranks; the loss is averaged, too.

        Every rank enters. Gradients of other models of the run are left as they are.
        """
        if not models:
            raise TrainingError("run.backward(loss) without models: expected those whose gradients are averaged.")
        for model in models:
            if not isinstance(model, nn.Module):
                raise TrainingError(
                    f"run.backward(loss, {type(model).__name__}): expected modules whose gradients are averaged. Name "
                    "the model that has the parameter, or a part of it."
                )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = f"of the shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r:.40}"
            raise TrainingError(
                f"run.backward(loss): the loss is {given}: expected a tensor of one number. Take the mean over "
                "the batch."
            )
        if hasattr(loss, "full_tensor"):
            raise TrainingError(
                "run.backward(loss): the loss is in shards, as a sum over parameters is with parallel.shard: expected "
                "a whole number. Have the optimizer decay weights, or add full_tensor() of what parameters give."
            )
        mean = loss.detach().clone()
        work = dist.all_reduce(mean, async_op=True) if self.ranks > 1 else None
        with self._gradients_of(loss, models):
            if self.ranks > 1:
                self._average_of(models).backward(loss)
            else:
                loss.backward()
        if work is not None:
            work.wait()
        return mean / self.ranks

    def average(self, value: torch.Tensor | float, weight: float = 1.0) -> float:
        """The mean of a number over ranks; every rank enters. A rank without a value has the weight 0."""
        own = [as_number(value, "value", "run.average") * weight if weight else 0.0, float(weight)]
        total, weights = self._group.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return total / weights if weights else math.nan

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal random numbers of this shape for every sample of the batch: the same whatever the number of ranks."""
        return self._draw(torch.randn, shape)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Random numbers between 0 and 1, likewise."""
        return self._draw(torch.rand, shape)

    @property
    def _group(self) -> Group:
        raise NotImplementedError

    @property
    def _plan(self) -> Plan:
        raise NotImplementedError

    @contextmanager
    def _gradients_of(self, loss: torch.Tensor, models: Sequence[nn.Module]) -> Iterator[None]:
        """Have a backward pass add to the gradients of these models, and of no others of the run."""
        asked: set[torch.Tensor] = {each for model in models for each in model.parameters()}
        others = [each for model in self._models for each in model.parameters() if each not in asked]
        gradients = [each.grad for each in others]
        with ExitStack() as stack:
            for model in self._sharded:
                stack.enter_context(model.backward(loss, asked))
            try:
                for each in others:
                    each.grad = None
                yield
            finally:
                for each, gradient in zip(others, gradients, strict=True):
                    each.grad = gradient

    def _average_of(self, models: Sequence[nn.Module]) -> GradientAverage:
        """What averages the gradients of those parameters of these models that ranks hold whole."""
        key = tuple(id(each) for each in models)
        if key not in self._averages:
            found = dict.fromkeys(each for model in models for each in model.parameters())
            parameters = [each for each in found if not any(model.holds(each) for model in self._sharded)]
            self._averages[key] = GradientAverage(parameters, self.ranks)
        return self._averages[key]

    def _draw(self, draw: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        plan = self._plan
        generator = torch.Generator(self.device)
        generator.manual_seed(mix(_DRAWN, self.config.seed, self.step, self._draws))
        self._draws += 1
        whole = draw(plan.global_batch, *shape, generator=generator, device=self.device)
        return whole[self.rank * plan.per_rank_batch :][: plan.per_rank_batch]


class RecipeStep(OwnStep):
    """What the step of a recipe is given as its first argument."""

    def __init__(
        self, config: RunConfig, plan: Plan, schedule: Schedule, group: Group, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config)
        self._models.append(model)
        self._shared_plan, self._schedule, self._ranks, self._own_device = plan, schedule, group, device
        self._done = 0

    @property
    def device(self) -> torch.device:
        return self._own_device

    @property
    def step(self) -> int:
        return self._done

    @property
    def lr(self) -> float:
        return self._schedule.lr_at(self._done)

    @property
    def _group(self) -> Group:
        return self._ranks

    @property
    def _plan(self) -> Plan:
        return self._shared_plan

    def begin(self, done: int) -> None:
        """Begin the step after so many."""
        self._done, self._draws = done, 0


def by_name(optimizers: Any) -> dict[str, Any]:
    """What `optim` has made for a step of the user's own, by name: one optimizer, or several."""
    return dict(optimizers) if isinstance(optimizers, Mapping) else {"optimizer": optimizers}


def check_optimizers(folder: Path, optimizers: Any) -> None:
    """Refuse a checkpoint that holds other optimizers than the step of this run has."""
    there = set(_read_optimizers(folder)) if (folder / _OPTIMIZERS).is_file() else set()
    if there != set(by_name(optimizers)):
        raise CheckpointError(
            f"checkpoint {folder} holds the optimizers {', '.join(sorted(there)) or 'of no step'}, and this run has "
            f"{', '.join(by_name(optimizers))}. Resume with the recipe that made it, without overrides of step and "
            "optim.*."
        )


def _read_optimizers(folder: Path) -> dict[str, Any]:
    return torch.load(folder / _OPTIMIZERS, map_location="cpu", weights_only=True)


class StepLearner(TorchLearner):
    """A model that a function of the user's trains; it is validated, averaged and saved as in any other recipe."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        schedule: Schedule,
        group: Group,
        mesh: Mesh,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizers: Any,
        metrics: Metrics,
        at: Callable[[StepPart, int], None] = lambda *_: None,
    ) -> None:
        super().__init__(config, plan, group, mesh, model, criterion, optimizers, metrics, at)
        assert config.step is not None
        self.timer, self.runs_ahead = NoTimer(), False  # a function may read what its steps have computed
        self._function = functools.partial(config.step.locate(), **config.step.options())
        self._run = RecipeStep(config, plan, schedule, group, mesh.device, model)
        self._values = StepValues(self.names, plan.per_rank_batch, mesh.device)
        self._optimizers = by_name(optimizers)
        self._rates = [each["lr"] / config.optim.lr for each in self._groups()]

    def _spread(self, config: RunConfig, group: Group, mesh: Mesh) -> tuple[nn.Module, Silence]:
        """The pass of validation; gradients are averaged where the function calls `run.backward`."""
        broadcast_weights(self.model, group.world_size)
        return self._pass, nullcontext

    # A step.

    def forward_backward(self, batch: RankBatch, measure: bool) -> torch.Tensor:
        """The whole step, which the function makes with rates of the schedule; the loss that it returns."""
        self._step = batch.step + 1
        self._at(StepPart.COMPUTE, self._step)
        self._seed_pass(batch, 0)
        self._run.begin(batch.step)
        for group, ratio in zip(self._groups(), self._rates, strict=True):
            group["lr"] = ratio * self._run.lr
        inputs, targets = batch.micro_batches[0]
        found = self._function(self._run, self.model, self.optimizer, (self._laid_out(inputs), targets))
        values = found if isinstance(found, Mapping) else {"loss": found}
        if not isinstance(values.get("loss"), torch.Tensor | float):
            assert self._config.step is not None
            raise TrainingError(
                f"step.name={self._config.step.name!r} returned {found!r:.60} in step {self._step}: expected the loss, "
                "or a mapping from names to values with loss among them."
            )
        loss = self._values.add(values, "the step returned")
        self.names = self._values.names
        return loss

    def _groups(self) -> Iterator[dict[str, Any]]:
        """The groups of parameters of all optimizers, which are others after a state is loaded."""
        for each in self._optimizers.values():
            yield from getattr(each, "param_groups", ())

    def clip_gradients(self) -> None:
        """Nothing: the function has made the whole step."""

    def update_weights(self, lr: float) -> None:
        """Move averaged weights towards those that the function has left."""
        if self._ema:
            self._ema.update()

    def dry_run(self, batch: RankBatch) -> tuple[float, float]:
        """Nothing, of no sample: a step of the function has its effect."""
        self.model.train()
        return 0.0, 0.0

    # What is measured.

    def totals(self) -> torch.Tensor:
        return self._values.totals()

    def take_totals(self) -> Callable[[], torch.Tensor]:
        return taken(self._values)

    def put_totals(self, totals: Sequence[float], is_first: bool) -> None:
        self._values.put(totals, is_first)

    def evaluate(self, data: Any, group: Group, goes_on: Callable[[], bool]) -> torch.Tensor:
        """The totals of this rank's part of a dataset; values that only steps give have the weight 0."""
        sums, weights = super().evaluate(data, group, goes_on).chunk(2)
        unmeasured = torch.zeros(len(self.names) - len(sums), dtype=torch.float64)
        return torch.cat([sums, unmeasured, weights, unmeasured])

    # What is saved.

    def write(self, folder: Path, group: Group) -> list[Path]:
        """Write the model from all ranks, and the optimizers, which are the same on every rank, from rank 0."""
        problem: Exception | None = None
        try:
            if group.is_first:
                self._write_optimizers(folder)
        except Exception as found:  # raised below: the other ranks are in a collective until then
            problem = found
        files = store.write_state(folder, self.model, (), group, averages=self._ema_state())
        if problem is not None:
            raise problem
        return files

    def _write_optimizers(self, folder: Path) -> None:
        content = io.BytesIO()
        torch.save({name: each.state_dict() for name, each in self._optimizers.items()}, content)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _OPTIMIZERS, content.getvalue())

    def load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Read a checkpoint into the model and the optimizers."""
        store.load_state(folder, self.model, (), self._ema_state())
        state = _read_optimizers(folder)
        for name, each in self._optimizers.items():
            each.load_state_dict(state[name])
        self.names = self._values.names = tuple(progress["names"])

    def progress(self) -> dict[str, Any]:
        """The names of the values in the totals."""
        return {"names": list(self.names)}


def broadcast_weights(model: nn.Module, world_size: int) -> None:
    """Give a model the weights that rank 0 has; every rank enters."""
    if world_size > 1:
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                dist.broadcast(value.data, 0)
