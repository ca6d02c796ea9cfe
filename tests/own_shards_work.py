"""What ranks do in the tests of loops of one's own whose models are in shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from own_work import Numbers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tutti.errors import TuttiError
from tutti.train.own import Run, start

PLAIN = {"tensorboard": False}


class Five(Numbers):
    """Samples that two ranks do not share equally."""

    def __len__(self) -> int:
        return 5


class Blocks(nn.Module):
    """A network with parameters in units and outside of them; its parts on 2 and 3 ranks are not equal."""

    def __init__(self, inputs: int = 2, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(width))
        self.last = nn.Linear(width, 1)

    def units(self) -> list[str]:
        return ["blocks.0", "blocks.2"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.first(inputs))
        for block in self.blocks:
            found = found + self.scale * torch.tanh(block(found))
        return self.last(found)


def slope(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The derivative by inputs, itself differentiable."""
    inputs = inputs.detach().requires_grad_()
    (found,) = torch.autograd.grad(network(inputs).sum(), inputs, create_graph=True)
    return found


def vectorized_slope(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda one: network(one).sum()))(inputs)


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "outputs": lambda network, inputs: network(inputs).square().mean(),
    "twice": lambda network, inputs: (network(inputs) * network(inputs.detach().requires_grad_())).mean(),
    "slopes": lambda network, inputs: (slope(network, inputs).norm(dim=1) - 1).square().mean(),
    "slopes_first": lambda network, inputs: (slope(network, inputs) + network(2 * inputs)).square().mean(),
    "slopes_last": lambda network, inputs: (network(2 * inputs) + slope(network, inputs)).square().mean(),
    "vectorized": lambda network, inputs: vectorized_slope(network, inputs).square().mean(),
}


@contextmanager
def opened(out: str, shard: Any, **options: Any) -> Iterator[Run]:
    with start("shards", Numbers(), batch=4, epochs=1, out=out, parallel={"shard": shard}, log=PLAIN, **options) as run:
        yield run


def whole(value: torch.Tensor | None) -> list[float]:
    """All elements of a tensor that ranks may share, none of one that is absent; every rank enters."""
    if value is None:
        return []
    return (value.full_tensor() if isinstance(value, DTensor) else value.detach()).flatten().tolist()


def held(model: nn.Module) -> int:
    """The elements of parameters for which this rank has memory."""
    return sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in model.parameters())


def train(out: str, shard: Any, losses: tuple[str, ...]) -> dict[str, list[Any]]:
    """Train a network with each of these losses; its last gradients, and its weights after clipped steps.

    Between a pass and its step the network is evaluated, and differentiated twice, which the step must not notice.
    """
    torch.set_default_dtype(torch.float64)
    found: dict[str, list[Any]] = {}
    for name in losses:
        with opened(out, shard) as run:
            network = run.model(Blocks())
            adam = torch.optim.Adam(network.parameters(), lr=1e-2)
            run.keep(network=network, adam=adam)
            passed = []
            for _ in run.batches():
                inputs = run.normal(2)
                told = run.backward(LOSSES[name](network, inputs), network)
                with torch.no_grad():
                    network(inputs)
                norm = nn.utils.clip_grad_norm_(network.parameters(), 0.1)
                passed = [float(told), whole(norm), [whole(each.grad) for each in network.parameters()]]
                slope(network, inputs)
                adam.step()
                adam.zero_grad()
                run.log(loss=told)
            found[name] = [passed, [whole(each) for each in network.parameters()]]
    return found


def passed(out: str, shard: Any) -> dict[str, Any]:
    """What passes leave that name one of two networks, a part of one, or networks of which only some are in shards."""
    torch.set_default_dtype(torch.float64)
    with opened(out, shard) as run:
        maker, judge = run.model(Blocks(width=6)), run.model(Blocks(inputs=1))
        plain = nn.Linear(1, 1)
        run.keep(maker=maker, judge=judge, plain=plain, sgd=torch.optim.SGD(judge.parameters(), lr=0.1))
        found: dict[str, Any] = {"held": (held(maker), sum(each.numel() for each in maker.parameters()))}

        def gradients(model: nn.Module) -> list[Any]:
            return [whole(each.grad) for each in model.parameters()]

        for _ in run.batches():
            inputs = run.normal(2)
            told = run.backward(judge(maker(inputs)).square().mean(), judge)
            found["judge"] = [float(told), gradients(judge), gradients(maker)]
            through = judge(maker(inputs)).square().mean()
            with CommDebugMode() as seen:
                run.backward(through, maker)
            found["reduced"] = seen.get_comm_counts()[torch.ops.c10d._reduce_scatter_base_]
            found["judge_untouched"] = gradients(judge) == found["judge"][1]
            found["maker"] = gradients(maker)
            run.backward(judge(maker(inputs)).square().mean(), maker)
            found["maker_twice"] = gradients(maker)
            maker.zero_grad()
            run.backward((judge(maker(inputs)) + plain(inputs[:, :1])).square().mean(), maker.last, plain)
            found["parts"] = [gradients(maker), gradients(plain)]
            maker.zero_grad()
            judge.zero_grad()
            steep = slope(judge, inputs[:, :1]).square().mean()
            run.backward(judge(maker(inputs)).square().mean(), maker)  # between a graph of slopes and its backward pass
            run.backward(steep, judge)
            found["steep"] = [gradients(maker), gradients(judge)]
            for model in (maker, judge, plain):
                model.zero_grad()
            run.log(loss=told)
            with torch.no_grad():  # as many passes on each rank, of 2 samples and of 3
                shared = [(each, judge(each.double())) for each, _ in run.share(Five(), batch=1)]
            found["shared"] = [each.flatten().tolist() for each, _ in shared]
        found["in_shards"] = all(isinstance(each, DTensor) for each in judge.parameters())
        found["units"] = [name for name, each in judge.named_modules() if isinstance(each, FSDPModule)]
    return found


def mistakes(out: str) -> dict[str, str]:
    """What is said of mistakes with shards, by their names."""

    def lbfgs(run: Run) -> None:
        network = run.model(Blocks())
        run.keep(network=network, newton=torch.optim.LBFGS(network.parameters()))
        next(run.batches())

    def early(run: Run) -> None:
        network = Blocks()
        sgd = torch.optim.SGD(network.parameters(), lr=0.1)
        run.keep(network=run.model(network), sgd=sgd)
        next(run.batches())

    def penalty(run: Run) -> None:
        network = run.model(Blocks())
        run.keep(network=network)
        for _ in run.batches():
            run.backward(torch.stack([each.square().sum() for each in network.parameters()]).sum(), network)

    def stale(run: Run) -> None:
        network = run.model(Blocks())
        sgd = torch.optim.SGD(network.parameters(), lr=0.1)
        run.keep(network=network, sgd=sgd)
        for _ in run.batches():
            loss = network(run.normal(2)).mean()
            run.backward(network(run.normal(2)).mean(), network)
            sgd.step()
            run.backward(loss, network)

    def three(run: Run) -> None:
        run.model(Blocks())

    found = {}
    for script, shard in (
        (lbfgs, "all"),
        (early, "all"),
        (penalty, "all"),
        (stale, "all"),
        (three, 3),
        (three, "some"),
    ):
        try:
            with opened(out, shard) as run:
                script(run)
        except TuttiError as error:
            found[f"{script.__name__} {shard}"] = f"{type(error).__name__}: {error}"
    return found
