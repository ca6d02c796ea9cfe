"""What ranks do in the tests of Horovod's optimizer, broadcasts and batch norm; each function runs on every rank."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hvd_jobs import in_a_job, refused
from torch import nn

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet
from tutti.horovod.gradients import Compression
from tutti.horovod.torch import functions, ops
from tutti.horovod.torch.collectives import SyncBatchNorm
from tutti.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from tutti.horovod.torch.ops import Adasum, Sum
from tutti.horovod.torch.optimizer import DistributedOptimizer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.99), "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.01, "initial_accumulator_value": 0.5},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def joined(step: int) -> torch.Tensor:
    return torch.cat([batch(rank, step) for rank in range(basics.size())])


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def numbers(model: nn.Module) -> list[float]:
    return torch.cat([value.reshape(-1) for value in model.state_dict().values()]).tolist()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def distributed(model: nn.Module, **options: Any) -> Any:
    return DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **options)


# Training.


@in_a_job
def train_in_all_ways(steps: int) -> dict[str, list[float]]:
    """The weights after some steps with this rank's data, and with the data of all ranks in one process."""
    first = network()
    ways: dict[str, Callable[[nn.Sequential], dict[str, Any]]] = {
        "plain": lambda model: {"named_parameters": model.named_parameters()},
        "unnamed": lambda model: {},
        "two groups": lambda model: {"groups": 2},
        "more groups than parameters": lambda model: {"groups": 9},
        "a list of groups": lambda model: {"groups": [[model[0].weight, model[2].bias], []]},
        "predivided": lambda model: {"gradient_predivide_factor": 4.0},
        "fp16": lambda model: {"compression": Compression.fp16},
        "own compressor": lambda model: {"compression": Doubling},
    }
    found = {}
    for way, options in ways.items():
        model = network(seed=basics.rank())
        optimizer = DistributedOptimizer(sgd(model), **options(model))
        broadcast_parameters(model.state_dict(), root_rank=0)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, batch(basics.rank(), step)).backward()
            optimizer.step()
        found[way] = numbers(model)
    optimizer = sgd(first)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(first, joined(step)).backward()
        optimizer.step()
    return found | {"one process": numbers(first)}


class Doubling:
    """A user's compressor: its context is a number."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


@in_a_job
def accumulate() -> None:
    """Gradients of passes are summed, those of ranks averaged or summed; too few passes are reduced as well."""
    for passes, options, factor in ((2, {}, 1.0), (2, {"op": Sum}, 2.0), (1, {}, 1.0), (2, {"groups": 2}, 1.0)):
        model, reference = network(), network()
        optimizer = distributed(model, backward_passes_per_step=2, **options)
        for step in range(passes):
            loss_of(model, batch(basics.rank(), step)).backward()
            loss_of(reference, joined(step)).backward()
        optimizer.synchronize()
        for mine, right in zip(gradients(model), gradients(reference), strict=True):
            torch.testing.assert_close(mine, factor * right)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(1)
        loss_of(model, batch(basics.rank(), 7)).backward()
        optimizer.step()


@in_a_job
def clip() -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(basics.rank(), step)).backward()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
            plain.zero_grad()
            loss_of(reference, joined(step)).backward()
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
            plain.step()
    assert norm > 0.05
    torch.testing.assert_close(torch.tensor(numbers(model)), torch.tensor(numbers(reference)))


@in_a_job
def synchronize_and_step() -> tuple[list[str], list[float], list[str]]:
    """Warnings of a step after a synchronisation, what the step used, and warnings of a normal step after it."""
    model = network()
    optimizer = DistributedOptimizer(sgd(model), op=Sum)
    loss_of(model, batch(0, 0)).backward()
    own = gradients(network_after_pass())
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as first:
        warnings.simplefilter("always")
        optimizer.step()
    ratios = [(mine / right).mean().item() for mine, right in zip(gradients(model), own, strict=True)]
    optimizer.zero_grad()
    loss_of(model, batch(0, 1)).backward()
    with warnings.catch_warnings(record=True) as second:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(each.message) for each in first], ratios, [str(each.message) for each in second]


def network_after_pass() -> nn.Module:
    model = network()
    loss_of(model, batch(0, 0)).backward()
    return model


@in_a_job
def break_the_protocol() -> list[tuple[str, str]]:
    model = network()
    optimizer = distributed(model)
    loss_of(model, batch(0, 0)).backward()
    errors = [refused(optimizer.zero_grad)]
    errors.append(refused(lambda: loss_of(model, batch(0, 1)).backward()))
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    optimizer.set_backward_passes_per_step(2)
    loss_of(model, batch(0, 2)).backward()
    errors.append(refused(optimizer.zero_grad))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that create_graph makes a cycle
        errors.append(refused(lambda: loss_of(model, batch(0, 3)).backward(create_graph=True)))
    return errors


@in_a_job
def miss_gradients() -> None:
    """A layer without gradient on rank 1, one that no rank uses, one frozen before and one frozen after wrapping."""
    for options in ({}, {"groups": 1}):
        layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("all", "first", "none", "before", "after")})
        broadcast_parameters(layers.state_dict(), 0)
        layers["before"].requires_grad_(False)
        optimizer = DistributedOptimizer(sgd(layers, weight_decay=0.1), layers.named_parameters(), **options)
        layers["after"].requires_grad_(False)
        frozen = [layers[name].weight.clone() for name in ("before", "after")]
        used = ["all"] + (["first"] if basics.rank() == 0 else [])
        for _ in range(2):
            optimizer.zero_grad()
            sum(layers[name](torch.ones(1, 3)).sum() for name in used).backward()
            optimizer.step()
            assert (layers["all"].weight.grad == 1).all()
            assert (layers["first"].weight.grad == 0.5).all()
            assert (layers["none"].weight.grad == 0).all()
            assert layers["before"].weight.grad is None and layers["after"].weight.grad is None
        assert torch.equal(frozen[0], layers["before"].weight) and torch.equal(frozen[1], layers["after"].weight)
        everywhere = functions.allgather_object(numbers(layers))
        assert everywhere[0] == everywhere[1]


@in_a_job
def take_turns() -> None:
    """Two networks that are frozen and thawed in turn, as adversaries are."""
    maker, judge = network(), nn.Linear(2, 1)
    broadcast_parameters(judge.state_dict(), 0)
    optimizers = [distributed(maker), distributed(judge)]
    for turn in range(4):
        for part, model in enumerate((maker, judge)):
            model.requires_grad_(part == turn % 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        judge(maker(batch(basics.rank(), turn))).sum().backward()
        for part, model in enumerate((maker, judge)):
            assert all((p.grad is not None) == (part == turn % 2) for p in model.parameters())
        optimizers[turn % 2].step()
    everywhere = functions.allgather_object(numbers(maker) + numbers(judge))
    assert everywhere[0] == everywhere[1]


@in_a_job
def embed(options: dict[str, Any]) -> None:
    """Sparse gradients; in the second step rank 1 has none."""
    torch.manual_seed(0)
    table, reference = nn.Embedding(10, 3, sparse=True), nn.Embedding(10, 3)
    reference.load_state_dict(table.state_dict())
    optimizer = DistributedOptimizer(sgd(table, momentum=0.0), table.named_parameters(), **options)
    plain = sgd(reference, momentum=0.0)
    rows = [[torch.tensor([1, 2, 2]), torch.tensor([2, 9])], [torch.tensor([0, 1]), torch.tensor([], dtype=torch.long)]]
    for step in rows:
        optimizer.zero_grad()
        if len(step[basics.rank()]):
            table(step[basics.rank()]).square().sum().backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
        plain.zero_grad()
        (reference(torch.cat(step)).square().sum() / basics.size()).backward()
        plain.step()
        torch.testing.assert_close(table.weight, reference.weight)


@in_a_job
def convolve_with_channels_last() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = DistributedOptimizer(sgd(model), model.named_parameters())
    broadcast_parameters(model.state_dict(), 0)
    inputs = torch.full((1, 3, 3, 3), basics.rank() + 1.0).contiguous(memory_format=torch.channels_last)
    model(inputs).sum().backward()
    assert not model.weight.grad.is_contiguous()
    optimizer.step()
    assert not model.weight.grad.is_contiguous() and (model.weight.grad == 1.5).all()


@in_a_job
def use_mixed_numbers_in_a_group() -> list[str]:
    first, second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False).double()
    both = nn.ModuleList([first, second])
    optimizer = DistributedOptimizer(sgd(both), groups=[list(both.parameters())])
    tiny = 1 + 2.0**-40
    (first(torch.ones(1, 2)).double() + second(torch.full((1, 2), tiny, dtype=torch.float64))).sum().backward()
    optimizer.step()
    assert (second.weight.grad == tiny).all() and (first.weight.grad == 1).all()
    return [str(p.grad.dtype) for p in both.parameters()]


@in_a_job
def step_with_a_closure() -> None:
    model, reference = network(), network()
    optimizer, plain = distributed(model), sgd(reference)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(basics.rank(), 0))
        loss.backward()
        return loss

    for _ in range(2):
        assert optimizer.step(closure).ndim == 0
        plain.zero_grad()
        loss_of(reference, joined(0)).backward()
        plain.step()
    torch.testing.assert_close(torch.tensor(numbers(model)), torch.tensor(numbers(reference)))


def work_in_a_process_set() -> None:
    """Ranks 0 and 1 train together, rank 2 alone."""
    pair = ProcessSet([0, 1])
    basics.init(process_sets=[pair])
    for options in ({}, {"groups": 1}):
        model = nn.Linear(1, 1, bias=False)
        optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), process_set=pair, **options)
        model(torch.tensor([[basics.rank() + 1.0]])).sum().backward()
        optimizer.step()
        assert model.weight.grad.item() == (3.0 if basics.rank() == 2 else 1.5)
    ops.barrier()
    basics.shutdown()


@in_a_job
def look_at_the_class() -> dict[str, Any]:
    """On one rank: what scripts rely on."""
    model = network()
    plain = torch.optim.Adagrad(model.parameters(), lr=0.3, initial_accumulator_value=0.5)
    optimizer = DistributedOptimizer(plain, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    loss_of(model, batch(0, 0)).backward()
    loss_of(model, batch(0, 1)).backward()  # one rank has no hooks, and so no limit of passes
    optimizer.step()
    scheduler.step()
    return {
        "name": type(optimizer).__name__,
        "module": type(optimizer).__module__,
        "is an Adagrad": isinstance(optimizer, torch.optim.Adagrad),
        "shares groups": optimizer.param_groups[0] is plain.param_groups[0],
        "lr": round(plain.param_groups[0]["lr"], 6),
        "defaults": optimizer.defaults["lr"],
        "steps": [state["step"].item() for state in (optimizer.state[model[0].bias], plain.state[model[0].bias])],
        "names": sorted(optimizer._parameter_names.values()),
        "hooks": calls,
        "least sum": min(state["sum"].min().item() for state in optimizer.state.values()) >= 0.5,
        "wrapped twice": refused(lambda: DistributedOptimizer(optimizer)),
        "adasum": type(DistributedOptimizer(sgd(network()), op=Adasum)).__name__,
    }


def train_one_elastic_rank() -> tuple[str, str]:
    """One rank that others may join later has hooks."""
    os.environ["HOROVOD_ELASTIC"] = "1"
    basics.init()
    model = network()
    optimizer = distributed(model)
    loss_of(model, batch(0, 0)).backward()
    error = refused(optimizer.zero_grad)
    optimizer.step()
    basics.shutdown()
    return error


# Broadcasts.


@in_a_job
def broadcast_weights() -> list[Any]:
    """A state dict, pairs, tensors without names, and what is refused."""
    rank = basics.rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    for value in model.state_dict().values():
        value.fill_(rank + 1)
    broadcast_parameters(model.state_dict(), root_rank=1)
    seen: list[Any] = [sorted(set(numbers(model)))]
    pairs = [("one", torch.tensor([rank])), ("flag", torch.tensor(rank == 0)), ("half", torch.full((2,), rank).half())]
    if rank == 1:
        broadcast_parameters(pairs[::-1], root_rank=0)  # names match them, not their order
    else:
        broadcast_parameters(pairs, root_rank=0)
    seen.append([tensor.tolist() for _, tensor in pairs])
    tensors = [torch.tensor([float(rank)]), torch.tensor([rank + 5])]
    broadcast_parameters(tensors, root_rank=1)
    seen.append([tensor.tolist() for tensor in tensors])
    parameters = list(nn.Linear(1, 1).named_parameters())
    broadcast_parameters(parameters, root_rank=0)
    seen.append(refused(lambda: broadcast_parameters(model.parameters(), 0)))  # pyright: ignore[reportArgumentType]
    seen.append(refused(lambda: broadcast_parameters({"note": "text"}, 0)))  # pyright: ignore[reportArgumentType]
    return seen


@in_a_job
def exchange_objects() -> list[Any]:
    rank = basics.rank()
    mine = {"epoch": rank, "lr": 0.1, "names": ["a"] * (100 * rank)}
    found = broadcast_object(mine if rank == 1 else None, root_rank=1)
    assert (found is mine) == (rank == 1)
    everything = functions.allgather_object([rank] * (3 * rank), name="lists")
    return [found["epoch"], len(found["names"]), broadcast_object(rank + 5), everything]


@in_a_job
def restore_on_the_first_rank(kind: str, wrapped: bool) -> dict[str, Any]:
    """Rank 0 has a trained optimizer, rank 1 an empty one with other options: both get the state of rank 0."""
    model = network()
    options = OPTIMIZERS[kind] if basics.rank() == 0 else {"lr": 7.0}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    if wrapped:
        optimizer = DistributedOptimizer(optimizer, model.named_parameters())
    if basics.rank() == 0:
        trained = network()
        own = getattr(torch.optim, kind)(trained.parameters(), **options)
        for step in range(3):
            own.zero_grad()
            loss_of(trained, batch(0, step)).backward()
            own.step()
        optimizer.load_state_dict(own.state_dict())
        model.load_state_dict(trained.state_dict())
    broadcast_parameters(model.state_dict(), 0)
    before = numbers(model)
    broadcast_optimizer_state(optimizer, 0)
    assert numbers(model) == before
    state = optimizer.state_dict()
    optimizer.zero_grad()
    loss_of(model, batch(0, 9)).backward()  # the same on all ranks, so that a plain optimizer stays the same too
    optimizer.step()
    return {"state": plain(state["state"]), "groups": plain(state["param_groups"]), "weights": numbers(model)}


def plain(value: Any) -> Any:
    """Values and their types, without tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return type(value).__name__, value


@in_a_job
def broadcast_fresh_state() -> dict[str, Any]:
    """Optimizers that have made no step: state is made, weights stay, zero gradients are left behind."""
    found: dict[str, Any] = {}
    model = network()
    model[0].bias.requires_grad_(False)
    before = numbers(model)
    optimizer = DistributedOptimizer(sgd(model, weight_decay=0.5), model.named_parameters())
    broadcast_optimizer_state(optimizer, 0)
    found["weights stay"] = numbers(model) == before
    found["gradients"] = [None if p.grad is None else p.grad.any().item() for p in model.parameters()]
    found["has state"] = [p in optimizer.state for p in model.parameters()]
    stateless = sgd(model, momentum=0.0, lr=0.1 * (basics.rank() + 1))
    broadcast_optimizer_state(stateless, 0)
    found["stateless"] = len(stateless.state), stateless.param_groups[0]["lr"]
    table = nn.Embedding(4, 2, sparse=True)
    for each in (torch.optim.SparseAdam(table.parameters()), sgd(table)):
        broadcast_optimizer_state(each, 0, model=table)
        table.zero_grad(set_to_none=False)
        table(torch.tensor([1])).sum().backward()
        each.step()
    found["partial"] = partial_state()
    found["LBFGS"] = refused(lambda: broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0))
    tensor_lr = torch.optim.Adam(network().parameters(), lr=torch.tensor(0.1 * (basics.rank() + 1)), foreach=False)
    broadcast_optimizer_state(tensor_lr, 0)
    found["lr tensor"] = plain(tensor_lr.param_groups[0]["lr"])
    groups = [{"params": p} for p in network().parameters()]
    other = torch.optim.Adam(network().parameters() if basics.rank() == 0 else groups)
    found["other groups"] = refused(lambda: broadcast_optimizer_state(other, 0))
    return found


def partial_state() -> list[int]:
    """Rank 0 has state for its second layer alone, rank 1 for its first alone."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    layer = model[2] if basics.rank() == 0 else model[0]
    sum(p.sum() for p in layer.parameters()).backward()
    optimizer.step()
    broadcast_optimizer_state(optimizer, 0)
    return [len(optimizer.state.get(p, {})) for p in model.parameters()]


# Batch norm.


@in_a_job
def normalize_over_ranks(dtype: torch.dtype, momentum: float | None, affine: bool, tracks: bool) -> None:
    """Ranks with different numbers of samples, against torch's batch norm of all samples in one process."""
    torch.manual_seed(0)
    whole = 3 * torch.randn(9, 4, 5, dtype=dtype) + 2
    mine = (whole[:2] if basics.rank() == 0 else whole[2:]).clone().requires_grad_()
    together = whole.clone().requires_grad_()
    layer, reference = (
        SyncBatchNorm(4, 1e-3, momentum, affine, tracks),
        nn.BatchNorm1d(4, 1e-3, momentum, affine, tracks),
    )
    if affine:
        with torch.no_grad():
            layer.weight.copy_(torch.arange(1.0, 5.0))
            layer.bias.copy_(torch.arange(4.0))
    reference.load_state_dict(layer.state_dict())
    rows = slice(0, 2) if basics.rank() == 0 else slice(2, 9)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for _ in range(2):
        output, expected = layer.normalize(mine), reference(together)
        assert output.dtype == dtype
        torch.testing.assert_close(output, expected[rows], **tolerance)
        output.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(mine.grad, together.grad[rows], **tolerance)
    for own, other in zip(layer.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(own, other, **tolerance)
    if affine:
        total = ops.synchronize(ops.allreduce_async(layer.weight.grad, name="weight", op=Sum))
        torch.testing.assert_close(total, reference.weight.grad, **tolerance)
    layer.eval()
    reference.eval()
    torch.testing.assert_close(layer.normalize(mine), reference(together)[rows], **tolerance)


@in_a_job
def normalize_nothing() -> list[float]:
    """Rank 1 has no samples."""
    layer = SyncBatchNorm(2)
    inputs = torch.tensor([[1.0, 10.0], [3.0, 30.0]])[: 0 if basics.rank() else 2].requires_grad_()
    layer.normalize(inputs).sum().backward()
    return layer.running_mean.tolist()


@in_a_job
def normalize_alone() -> tuple[bool, tuple[str, str]]:
    """One rank: torch's own batch norm."""
    inputs = torch.randn(4, 3)
    layer, reference = SyncBatchNorm(3), nn.BatchNorm1d(3)
    same = torch.equal(layer.normalize(inputs), reference(inputs))
    same &= torch.equal(layer.running_var, reference.running_var)
    return same, refused(lambda: layer(inputs))
