"""Models in stages: where they are cut, what is refused, and the same run as on one rank."""

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import OneRank, assert_same
from rank_jobs import run_ranks, train
from torch import nn

from tutti.config.layout import make_layout
from tutti.config.load import resolve_values
from tutti.config.plan import make_plan
from tutti.config.schema import ParallelConfig
from tutti.errors import ConfigError
from tutti.models.small import Mlp
from tutti.models.unet3d import UNet3d
from tutti.parallel.chain import Layer, check_chain, cut, measure_chain, name_chain
from tutti.parallel.mesh import Mesh
from tutti.parallel.stages import Pipeline

CPU = torch.device("cpu")
VALUES: dict[str, Any] = {
    "recipe": "staged",
    "data": {"name": "digits", "shift": 1},
    "model": {"name": "mlp", "hidden": [48, 40, 32, 32, 24, 24, 16], "dropout": 0.1},
    "optim": {"name": "adam", "lr": 2e-3, "clip_norm": 0.5},
    "batch": {"global": 64, "micro": 8, "eval": 50},
    "epochs": 1,
    "max_steps": 20,
    "log": {"every_steps": 1, "ledger": True, "tensorboard": False},
}


def layers(*seconds: float) -> list[Layer]:
    format = ("torch.float32", [2, 4])
    return [Layer(str(index), each, parameters=1, outputs=[format]) for index, each in enumerate(seconds)]


def test_the_slowest_part_is_as_fast_as_possible() -> None:
    assert cut(layers(1, 1, 1, 1), 2) == [range(2), range(2, 4)]
    assert cut(layers(5, 1, 1, 1, 2), 2) == [range(1), range(1, 5)]
    assert cut(layers(1, 1, 9, 1, 1), 3) == [range(2), range(2, 3), range(3, 5)]


def test_every_part_has_weights() -> None:
    flatten = Layer("0", 9.0, parameters=0)
    assert cut([flatten, *layers(1, 1)], 2) == [range(2), range(2, 3)]


class Chained(nn.Module):
    """Two layers with a step between them that `stages` may leave out."""

    def __init__(self, names: list[str], is_doubled: bool = False) -> None:
        super().__init__()
        self.first, self.second, self._names = nn.Linear(4, 4), nn.Linear(4, 4), names
        self.is_doubled = is_doubled

    def stages(self) -> list[str]:
        return self._names

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        return self.second(2 * values if self.is_doubled else values)


def refused(model: nn.Module, stages: int = 2, **parallel: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_chain(model, ParallelConfig(stages=stages, **parallel), stages)
    return str(error.value)


def test_a_sequence_is_cut_at_its_children() -> None:
    assert name_chain(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ["0", "1"]


def test_a_model_without_names_is_refused() -> None:
    assert refused(nn.Bilinear(2, 2, 2)).startswith(
        "parallel.stages with Bilinear: expected a model that names its parts. Give it a method stages()"
    )


def test_more_stages_than_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert refused(model, 4) == (
        "parallel.stages=4: Sequential has 3 modules with weights to train. Set parallel.stages=3 or less, or let its "
        "stages() name smaller modules."
    )
    assert "parallel.stages=2, 4 parts with parallel.schedule=interleaved: Sequential has 3 modules" in refused(
        model, schedule="interleaved"
    )


def test_wrong_names_are_refused() -> None:
    assert "Chained.stages() names 'third': expected the name of a module of Chained." in refused(Chained(["third"]))
    assert "second.weight is in none of the modules that stages() names" in refused(Chained(["first"]))


def test_a_parameter_of_two_stages_is_refused() -> None:
    model = Chained(["first", "second"])
    model.second.weight = model.first.weight
    assert "second.weight and first.weight are one parameter, of first and second" in refused(model)


def test_measuring_leaves_a_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    before = copy.deepcopy(model.state_dict())
    found = measure_chain(model, torch.randn(5, 4), CPU, nullcontext)
    shapes = [(each.name, *(shape for _, shape in each.outputs)) for each in found]
    assert shapes == [("0", [5, 6]), ("1", [5, 6]), ("2", [5, 6]), ("3", [5, 3])]
    assert [each.parameters for each in found] == [30, 12, 0, 21]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_names_that_leave_something_out_are_refused() -> None:
    measure_chain(Chained(["first", "second"]), torch.ones(2, 4), CPU, nullcontext)
    with pytest.raises(ConfigError, match=r"the modules of Chained.stages\(\), one after another, do not give"):
        measure_chain(Chained(["first", "second"], is_doubled=True), torch.ones(2, 4), CPU, nullcontext)


def test_modules_of_other_stages_are_freed_and_refuse_to_compute() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = Mesh(make_layout(ParallelConfig(stages=2), 2), 1, CPU)
    Pipeline(model, layers(1, 1), [("torch.float32", [2, 4])], mesh, ParallelConfig(stages=2))
    assert list(model.state_dict()) == ["1.weight", "1.bias"]
    with pytest.raises(RuntimeError, match="0 is in stage 0, on another rank"):
        model(torch.ones(2, 4))


def plan_of(ranks: int, micro: int, **parallel: Any) -> Any:
    return make_plan(
        resolve_values(VALUES | {"batch": {"global": 24, "micro": micro}, "parallel": parallel}), ranks, 99
    )


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(4, 12, stages=4)
    assert str(error.value) == (
        "parallel.schedule=1f1b with 4 stages, and 2 as the number of micro-batches in a step: expected 4 or more. "
        "Set batch.micro=6, or set parallel.schedule=gpipe, which takes any number."
    )
    assert plan_of(4, 12, stages=4, schedule="gpipe").passes == 2
    assert plan_of(4, 4, stages=4).passes == 6
    with pytest.raises(ConfigError, match=r"expected a multiple of 4. Set batch.micro=6, or"):
        plan_of(4, 4, stages=4, schedule="interleaved")


@pytest.mark.parametrize("other", [{"shard": "all"}, {"tensor": 2}])
def test_kinds_that_do_not_go_together_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        resolve_values(VALUES | {"parallel": {"stages": 2} | other})


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(VALUES, tmp_path_factory.mktemp("one"))


RUNS = {
    "gpipe": (2, {"stages": 2, "schedule": "gpipe"}),
    "1f1b": (2, {"stages": 2}),
    "interleaved": (2, {"stages": 2, "schedule": "interleaved"}),
    "zero bubble": (2, {"stages": 2, "schedule": "zero_bubble"}),
    "gpipe x4": (4, {"stages": 4, "schedule": "gpipe"}),
    "1f1b x4": (4, {"stages": 4}),
    "interleaved x4": (4, {"stages": 4, "schedule": "interleaved"}),
    "2 data x 2 stages": (4, {"stages": 2}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("run", RUNS)
def test_stages_train_as_one_rank(one_rank: OneRank, tmp_path: Path, run: str) -> None:
    ranks, parallel = RUNS[run]
    answers = run_ranks(ranks, train, VALUES | {"parallel": parallel, "out": str(tmp_path)})
    assert_same(answers[0]["folder"], one_rank.folder())
    whole = sum(each.numel() for each in Mlp((1, 8, 8), 10, VALUES["model"]["hidden"]).parameters())
    held = [len(answer["weights"]) for answer in answers]
    assert sum(held) == whole * ranks // parallel["stages"] and max(held) < whole


# With clipping the last bit of the norm depends on the cut, and batch norm over few samples amplifies it.
EXACT = {"model": VALUES["model"] | {"batch_norm": True}, "optim": {"name": "adam", "lr": 2e-3}}


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_batch_norm_in_stages_is_exact(one_rank: OneRank, tmp_path: Path, schedule: str) -> None:
    values = VALUES | EXACT | {"parallel": {"stages": 2, "schedule": schedule}, "out": str(tmp_path)}
    assert_same(run_ranks(2, train, values)[0]["folder"], one_rank.folder(**EXACT), tolerance=0)


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_in_half_precision(one_rank: OneRank, tmp_path: Path, precision: str) -> None:
    half = {"precision": precision}
    values = VALUES | half | {"parallel": {"stages": 2}, "out": str(tmp_path)}
    assert_same(run_ranks(2, train, values)[0]["folder"], one_rank.folder(**half), tolerance=1e-3)


def test_a_unet_is_cut_with_its_skip_connections() -> None:
    model = UNet3d(2, 3, width=4, depth=3)
    assert "UNet3d, whose stages pass several tensors" in refused(model, schedule="zero_bubble")
    check_chain(model, ParallelConfig(stages=4), 4)
    found = measure_chain(model, torch.randn(1, 2, 8, 8, 8), CPU, nullcontext)
    assert [each.name for each in found] == ["downs.0", "downs.1", "downs.2", "ups.0", "ups.1", "last"]
    assert [len(each.outputs) for each in found] == [1, 2, 3, 3, 2, 1], "volumes that a later level takes"


VOLUMES: dict[str, Any] = {
    "data": {"name": "nbody", "source": "synthetic", "box": 16, "crop": 8, "train_samples": 64, "valid_samples": 6},
    "model": {"name": "unet3d", "width": 2, "depth": 3},
    "loss": {"name": "l1"},
    "metrics": [],
    "batch": {"global": 8, "micro": 2, "eval": 4},
    "max_steps": 8,
}


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_skip_connections_pass_through_stages(one_rank: OneRank, tmp_path: Path, schedule: str) -> None:
    values = VALUES | VOLUMES | {"parallel": {"stages": 2, "schedule": schedule}, "out": str(tmp_path)}
    assert_same(run_ranks(2, train, values)[0]["folder"], one_rank.folder(**VOLUMES))
