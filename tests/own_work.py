"""What ranks do in the tests of scripts with a loop of their own; these examples are such scripts."""

import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rank_jobs
import torch
import torch.distributed as dist
from conftest import REPOSITORY
from torch import nn
from torch.distributed.tensor import DTensor

import tutti
from tutti.config.recipes import read_yaml
from tutti.config.schema import RuntimeConfig
from tutti.errors import TuttiError
from tutti.parallel.averaging import GradientAverage
from tutti.ranks.environments import discover
from tutti.ranks.group import joined
from tutti.train import job
from tutti.train.own import Run, start
from tutti.train.own_step import RecipeStep

OPTIONS: dict[str, Any] = {
    "log": {"every_steps": 4, "ledger": True, "tensorboard": False},
    "checkpoint": {"every_steps": 5, "every_epochs": None, "keep": 3},
}


def train_recipe(values: dict[str, Any], resume: str | None = None, kill_at: int | None = None) -> dict[str, Any]:
    """Train examples/gan.yaml as this rank, with few samples and other values; it is killed after a step."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    gan = importlib.import_module("gan")
    gan.Ring.__len__ = lambda self: 256
    recipe = read_yaml(REPOSITORY / "examples" / "gan.yaml")
    return rank_jobs.train(recipe | {"recipe": "gan"} | OPTIONS | values, resume, kill_at)


def step_without_loss(run: RecipeStep, model: nn.Module, optimizers: Any, batch: Any) -> dict[str, float]:
    return {"critic": 1.0}


class Unused(torch.optim.SGD):
    """An optimizer that takes the place of another."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters)


def run_example(
    name: str,
    out: str,
    epochs: int,
    resume: str | None = None,
    kill_at: int | None = None,
    shard: str | int = "none",
    with_adam: bool = False,
) -> dict[str, Any]:
    """Run an example as this rank, with few samples; it is killed after a step. With Adam, no step is of L-BFGS.

    The parameters in all models, and those of them that this rank holds, come back.
    """
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if name == "gan":
        example.Ring.__len__ = lambda self: 256
    if with_adam:
        example.ADAM_STEPS = epochs
        torch.optim.LBFGS = Unused
    tutti.start = functools.partial(start, out=out, parallel={"shard": shard}, **OPTIONS)
    sys.argv = [f"{name}.py", "--epochs", str(epochs), *(["--resume", resume] if resume else [])]
    end_step = job.Job.end_step

    def end_step_or_die(self: job.Job[Any], loss: Any) -> None:
        end_step(self, loss)
        if self.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    models: list[nn.Module] = []
    make_model = Run.model

    def made(self: Run, model: nn.Module) -> nn.Module:
        models.append(make_model(self, model))
        return models[-1]

    job.Job.end_step, Run.model = end_step_or_die, made
    example.main()
    parameters = [each for model in models for each in model.parameters()]
    held = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
    return {"all": sum(each.numel() for each in parameters), "held": sum(each.numel() for each in held)}


class Numbers:
    """Inputs 0, 1, ... with themselves as targets."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.tensor([float(index)])


def steps_of(run: Run, keeps: bool = True) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """A line that is fitted, and the batches of a run."""
    line = run.model(nn.Linear(1, 1))
    if keeps:
        run.keep(line=line, sgd=torch.optim.SGD(line.parameters(), lr=1e-3))
    for inputs, _ in run.batches():
        yield line, inputs


def mistakes(out: str) -> dict[str, str]:
    """What is said of mistakes in scripts, by their names."""

    def nothing_kept(run: Run) -> None:
        next(steps_of(run, keeps=False))

    def no_loss(run: Run) -> None:
        list(steps_of(run))

    def other_names(run: Run) -> None:
        for step, _ in enumerate(steps_of(run)):
            run.log(loss=0.0, **{f"value{step}": 1.0})

    def kept_late(run: Run) -> None:
        for line, _ in steps_of(run):
            run.keep(line=line)

    def epoch_early(run: Run) -> None:
        for _ in steps_of(run):
            run.log_epoch(valid_loss=1.0)

    def no_models(run: Run) -> None:
        for line, inputs in steps_of(run):
            run.backward(line(inputs).mean())

    def no_state(run: Run) -> None:
        run.keep(number=3)  # pyright: ignore[reportArgumentType]

    def too_early(run: Run) -> None:
        run.log(loss=0.0)

    def not_one_number(run: Run) -> None:
        for line, inputs in steps_of(run):
            run.log(loss=line(inputs))

    def no_number(run: Run) -> None:
        for _ in steps_of(run):
            run.log(loss="small")  # pyright: ignore[reportArgumentType]

    def taken_name(run: Run) -> None:
        for _ in steps_of(run):
            run.log(loss=0.0, lr=0.1)

    def taken_epoch(run: Run) -> None:
        for _ in steps_of(run):
            run.log(loss=0.0)
            if run.ends_epoch:
                run.log_epoch(train_loss=1.0)

    def many_losses(run: Run) -> None:
        for line, inputs in steps_of(run):
            run.backward(line(inputs), line)

    def no_module(run: Run) -> None:
        for line, inputs in steps_of(run):
            run.backward(line(inputs).mean(), line.weight)  # pyright: ignore[reportArgumentType]

    def no_model(run: Run) -> None:
        run.model(3)  # pyright: ignore[reportArgumentType]

    def no_share(run: Run) -> None:
        for _ in steps_of(run):
            list(run.share(Numbers(), batch=-1))

    def many_averages(run: Run) -> None:
        run.average(torch.ones(2))

    def not_finite(run: Run) -> None:
        for _ in steps_of(run):
            run.log(loss=float("nan"))

    found = {}
    scripts = (nothing_kept, no_loss, other_names, kept_late, epoch_early, no_models, no_state, too_early, not_finite)
    scripts += (not_one_number, no_number, taken_name, taken_epoch, many_losses, no_module, no_model, no_share)
    scripts += (many_averages,)
    for script in scripts:
        try:
            with start(script.__name__, Numbers(), batch=2, epochs=1, out=out) as run:
                script(run)
        except TuttiError as error:
            found[script.__name__] = f"{type(error).__name__}: {error}"
    plain: dict[str, Any] = {"batch": 4, "epochs": 1, "out": out}
    refused: dict[str, dict[str, Any]] = {
        "staged": {"parallel": {"shard": "all", "stages": 2}},
        "tensor": {"parallel": {"tensor": 2}},
        "noise": {"log": {"noise_scale": True}},
        "best": {"checkpoint": {"best": "loss"}, "batch": 8},
        "batch": {"batch": 9},
        "no_batch": {"batch": 0},
        "precision": {"precision": "bf16"},
        "compile": {"speed": {"compile": True}},
        "buckets": {"ddp": {"bucket_mb": 5.0}},
        "optim": {"optim": {"clip_norm": 1.0}},
        "metrics": {"metrics": ["accuracy"]},
    }
    for key, options in refused.items():
        try:
            with start(key, Numbers(), **(plain | options)) as run:
                for _ in steps_of(run):
                    run.log(loss=0.0)
        except TuttiError as error:
            found[key] = f"{type(error).__name__}: {error}"
    return found


def leave(out: str, after: int, logs: bool) -> tuple[int, dict[str, Any]]:
    """Leave the loop in a step; the step of the run's last checkpoint, and its record."""
    with start("left", Numbers(), batch=2, epochs=3, out=out) as run:
        for _ in steps_of(run):
            if logs or run.step < after:
                run.log(loss=float(run.step))
            if run.step == after:
                break
    opened = tutti.open_run(run.folder.path)
    return opened.checkpoints[-1].step, opened.record


def shown_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric that shows what it measures."""
    tutti.summary.histogram("scores", outputs)
    tutti.summary.text("first_target", f"target {int(targets[0])}")
    return (outputs.argmax(-1) == targets).float()


def shown_loop(out: str) -> Path:
    """A loop with a picture in every step, of which those of log windows are written, and one that is no picture."""
    options: dict[str, Any] = OPTIONS | {"log": {"every_steps": 2}}
    with start("shown", Numbers(), batch=2, epochs=1, out=out, **options) as run:
        for line, inputs in steps_of(run):
            run.log(loss=run.backward(line(inputs).square().mean(), line))
            tutti.summary.image("picture", torch.full((2, 3), run.step / 10))
            tutti.summary.image("no_picture", "text")
    return run.folder.path


def validated(out: str) -> tuple[list[float], list[float], Path]:
    """A loop that validates: the numbers that this rank has seen, its means over ranks, and the run folder."""
    seen, means = [], []
    with start("validated", Numbers(), batch=4, epochs=2, out=out, **OPTIONS) as run:
        for line, inputs in steps_of(run):
            run.log(loss=run.backward(line(inputs).square().mean(), line))
            if run.ends_epoch:
                own = torch.cat([each for each, _ in run.share(Numbers(), batch=3)])
                seen += own.flatten().tolist()
                means.append(run.average(own.mean(), weight=len(own)))
                run.log_epoch(valid_loss=means[-1])
    return seen, means, run.folder.path


def averaged() -> list[list[float] | None]:
    """Gradients averaged over ranks: of two types, one that no loss depends on, and of two passes."""
    with joined(RuntimeConfig(), discover(os.environ)) as rank:
        own = rank.group.rank + 1.0
        first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.float64))
        unused = nn.Parameter(torch.ones(1))
        average = GradientAverage([first, unused, second], rank.group.world_size)
        average.backward(own * first.sum() + own * second.square().sum())
        average.backward(own * first.sum())
        local = nn.Parameter(torch.ones(1))
        (own * local).sum().backward()
        dist.barrier()
        return [None if each.grad is None else each.grad.tolist() for each in (first, second, unused, local)]
