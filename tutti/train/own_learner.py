"""What a script with a training loop of its own keeps, as a job saves, restores and measures it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.store import Key, check_model, model_shape, read_kept, replace_values, write_kept
from tutti.checkpoint.weights import StartingPoint
from tutti.config.layout import make_layout
from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.config.schedule import Schedule, make_schedule
from tutti.config.schema import DdpConfig, InitConfig, ParallelConfig
from tutti.data.loader import RankBatch
from tutti.errors import CheckpointError, ConfigError
from tutti.parallel.batch_statistics import BatchStatistics
from tutti.parallel.mesh import Mesh
from tutti.ranks.group import Group, Joined, PreflightCheck, RankCheck, joined
from tutti.ranks.placement import Placement
from tutti.runs.step_parts import StepPart
from tutti.train.job import Job
from tutti.train.metrics import StepValues, taken
from tutti.train.own_step import Stateful
from tutti.train.timing import NoTimer, StepTimer


def _models(kept: Mapping[str, Stateful]) -> dict[str, nn.Module]:
    return {name: each for name, each in kept.items() if isinstance(each, nn.Module)}


def _shape(kept: Mapping[str, Stateful]) -> dict[str, str]:
    return {f"{name}.{key}": kind for name, each in _models(kept).items() for key, kind in model_shape(each).items()}


class OwnLearner:
    """The models and optimizers of a script, as a job saves and restores them, and the values that it logs."""

    reports_phases = True
    runs_ahead = False  # a script may read what its steps have computed
    biases: tuple[str, ...] = ()

    def __init__(self, kept: Mapping[str, Stateful], plan: Plan, group: Group, device: torch.device) -> None:
        self.timer: StepTimer = NoTimer()
        self._kept = kept
        self._values = StepValues(("loss",), plan.per_rank_batch, device)
        self.names = self._values.names
        mesh = Mesh(plan.layout, group.rank, device)
        self._statistics = [BatchStatistics(each, 1, mesh) for each in self.model.values()]

    @property
    def model(self) -> dict[str, nn.Module]:
        """The models, by their names."""
        return _models(self._kept)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(each for model in self.model.values() for each in model.parameters()))

    @property
    def parameters(self) -> int:
        """The number of parameters of all models."""
        return sum(each.numel() for each in self._parameters)

    @property
    def gradient_bytes(self) -> int:
        """The bytes that ranks average in a step that computes the gradients of every model once."""
        return sum(each.nbytes for each in self._parameters if each.requires_grad)

    # What is measured.

    def add(self, values: Mapping[str, torch.Tensor | float]) -> torch.Tensor:
        """Add the values of a step, and return its loss."""
        loss = self._values.add(values, "run.log")
        self.names = self._values.names
        return loss

    def totals(self) -> torch.Tensor:
        """The sums of the values over this rank's samples, then their weights."""
        return self._values.totals()

    def take_totals(self) -> Callable[[], torch.Tensor]:
        """Set the totals to zero; returns a function that gives what they were."""
        return taken(self._values)

    def put_totals(self, totals: Sequence[float], is_first: bool) -> None:
        """Hold given totals on rank 0 and zeros elsewhere."""
        self._values.put(totals, is_first)

    def take_squares(self) -> dict[int, list[float]]:
        """Nothing: the gradients of such a loop are not measured."""
        return {}

    def dry_run(self, batch: RankBatch) -> tuple[float, float]:
        """Not possible: only the script can make a step."""
        raise NotImplementedError

    def evaluate(self, data: Any, group: Group, goes_on: Callable[[], bool]) -> torch.Tensor:
        """Not possible: only the script can evaluate."""
        raise NotImplementedError

    def evaluated(self) -> tuple[()]:
        """Nothing, for the same reason."""
        return ()

    def combine_ranks(self, group: Group) -> None:
        """Average the statistics of batch norm over ranks; every rank enters."""
        for each in self._statistics:
            each.combine_ranks()

    # What is saved.

    def shape(self) -> dict[str, str]:
        """The names, types and shapes of what the models save."""
        return _shape(self._kept)

    def write(self, folder: Path, group: Group) -> list[Path]:
        """Write the state of everything that is kept."""
        return write_kept(folder, self._state(), group)

    def load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Read a checkpoint into everything that is kept."""
        state = read_kept(folder, self._find_sharded())
        if set(state) != set(self._kept):
            raise CheckpointError(
                f"checkpoint {folder} holds {', '.join(state)}, and the script keeps {', '.join(self._kept)}. "
                "Resume with the script that made it."
            )
        for name, each in self._kept.items():
            each.load_state_dict(state[name])
        self.names = self._values.names = tuple(progress["names"])

    def _state(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._kept.items()}

    def _find_sharded(self) -> Callable[[Key, torch.Tensor], DTensor | None]:
        """What tells how ranks share a tensor of a checkpoint: as they do now, or as the parameter that it is of."""
        held: dict[Key, DTensor] = {}

        def note(key: Key, value: Any) -> None:
            if isinstance(value, DTensor):
                held[key] = value

        replace_values(self._state(), note)
        stepped = {
            name: [each for group in kept.param_groups for each in group["params"]]
            for name, kept in self._kept.items()
            if isinstance(kept, torch.optim.Optimizer)
        }

        def find(key: Key, value: torch.Tensor) -> DTensor | None:
            if key in held or len(key) != 4 or key[0] not in stepped or key[1] != "state":
                return held.get(key)
            parameter = stepped[key[0]][key[2]]  # of an optimizer, which has its state after its first step
            return parameter if isinstance(parameter, DTensor) and parameter.shape == value.shape else None

        return find

    def load_weights(self, folder: Path, averages: bool = False) -> None:
        """Not possible: a script gives its models the weights that it wants."""
        raise NotImplementedError

    def start_from(self, init: InitConfig) -> StartingPoint:
        """Not possible, for the same reason."""
        raise NotImplementedError

    def progress(self) -> dict[str, Any]:
        """The names of the values in the totals."""
        return {"names": list(self.names)}


@dataclass(frozen=True)
class OwnParts:
    """What a rank of a script's own loop builds alone."""

    plan: Plan
    schedule: Schedule
    train_data: Any
    kept: Mapping[str, Stateful]
    valid_data: None = None
    valid_sets: Mapping[str, Any] = field(default_factory=dict)

    def check_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        """Refuse a checkpoint of other models."""
        check_model(folder, manifest, _shape(self.kept), "Resume with the script that made it.")

    def make_learner(
        self, config: RunConfig, group: Group, device: torch.device, at: Callable[[StepPart, int], None]
    ) -> OwnLearner:
        """The learner of what the script keeps."""
        return OwnLearner(self.kept, self.plan, group, device)


class OwnFramework:
    """How ranks of a script's own loop meet, and what they build."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.kept: dict[str, Stateful] = {}

    def joined(
        self, config: RunConfig, placement: Placement, check: RankCheck, examine: PreflightCheck
    ) -> AbstractContextManager[Joined]:
        """Meet the other ranks in a process group of torch."""
        return joined(config.runtime, placement, check, examine)

    def check(self, config: RunConfig, world_size: int) -> None:
        """Refuse what only the loop of recipes does."""
        usual = ParallelConfig(shard=config.parallel.shard)
        refused = {f"parallel.{name}": value for name, value in config.parallel if value != getattr(usual, name)}
        refused |= {"batch.micro": config.batch.micro} if config.batch.micro is not None else {}
        refused |= {"log.noise_scale": "true"} if config.log.noise_scale else {}
        refused |= {"init.from": config.init.source} if config.init is not None else {}
        refused |= {f"valid.{name}": given for name, given in (config.valid or {}).items()}
        refused |= {"ema.decay": config.ema.decay} if config.ema is not None else {}
        for key, value in refused.items():
            raise ConfigError(
                f"{key}={value} with a loop of your own: expected models that the script steps, whole on every rank or "
                f"in shards (parallel.shard). Leave {key} out, or train with a recipe."
            )
        steps = [("precision", config.precision, "fp32", "the script chooses it with torch.autocast")]
        steps += [("speed.compile", config.speed.compile, False, "call compile() of each model where it is made")]
        for (name, value), (_, default) in zip(config.ddp, DdpConfig(), strict=True):
            steps += [(f"ddp.{name}", value, default, "run.backward averages gradients")]
        for key, value, default, instead in steps:
            if value != default:
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ConfigError(f"{key}={shown} with a loop of your own: {instead}. Leave {key} out.")
        make_layout(config.parallel, world_size)

    def prepare_data(self, config: RunConfig) -> None:
        """Nothing: the script has the data."""

    def build_parts(self, config: RunConfig, placement: Placement, device: torch.device) -> OwnParts:
        """The plan of steps for the script's data."""
        plan = make_plan(config, placement.world_size, len(self._data), placement.local_size)
        return OwnParts(plan, make_schedule(config, plan), self._data, self.kept)

    def train(self, job: Job[OwnLearner]) -> None:
        """Not possible: the script trains."""
        raise NotImplementedError

    def results(self, job: Job[OwnLearner]) -> dict[str, Any]:
        """What the record says of a finished run besides the results of all frameworks."""
        return {}
