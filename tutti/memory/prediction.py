"""Predicts the memory of one rank of a recipe in one process without a GPU: two steps on tensors without data."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tutti.config.plan import Plan, make_plan
from tutti.config.run import RunConfig
from tutti.data.dataset import Part, find_part
from tutti.errors import Cause, ConfigError, TuttiError, cause_of
from tutti.memory.rank import (
    Prediction,
    add_data,
    build_model,
    cut_batch,
    make_batches,
    make_optimizer_state,
    make_tracker,
    mark_rank,
    repeat,
    summarise,
    tracked,
)
from tutti.memory.samples import Samples, describe_samples, resident_bytes
from tutti.memory.stages import predict_stages
from tutti.memory.tracking import (
    ACTIVATIONS,
    AVERAGES,
    BATCH,
    GRADIENTS,
    PARAMETERS,
    TEMPORARIES,
    MemoryTracker,
    fake_ranks,
    make_fake_mode,
)
from tutti.optim.optimizers import build_optimizer
from tutti.parallel.mesh import Mesh
from tutti.parallel.recompute import recompute
from tutti.parallel.shard import shard_model, without_reduction
from tutti.ranks.device import applies
from tutti.train.ema import AveragedWeights
from tutti.train.learner import autocast, channels_last, put_channels_last
from tutti.train.spread import prepare_space, recomputed_units
from tutti.train.torch import build_loss


def predict(
    config: RunConfig,
    ranks: int,
    device: str = "cuda",
    samples: Samples | None = None,
    local_size: int | None = None,
    memory_bytes: int | None = None,
) -> Prediction:
    """The memory of rank 0 on a kind of device, which need not be here; no process group may be open.

    `memory_bytes` is the memory of the device, of which some datasets take a share. Raises ConfigError for what cannot
    be predicted.
    """
    if config.framework != "torch":
        raise ConfigError(f"framework={config.framework}: expected torch, whose memory alone can be predicted.")
    if config.step is not None:
        raise ConfigError(
            f"step={config.step.name}: expected a recipe without step, whose memory alone can be predicted. "
            "Train a few steps, and read the memory in `tutti runs`."
        )
    target = torch.device(device)
    samples = samples or describe_samples(config)
    plan = make_plan(config, ranks, samples.count, local_size)
    for name, degree in (("tensor", plan.layout.tensor), ("sequence", plan.layout.sequence)):
        if degree > 1:
            raise ConfigError(
                f"parallel.{name}={degree} is not predicted: expected ranks with whole layers and sequences. "
                f"Leave parallel.{name} out to see what one of its ranks would need without it."
            )
    found = _predict_step(config, plan, target, samples)
    return add_data(found, resident_bytes(config, plan, device, memory_bytes))


def _predict_step(config: RunConfig, plan: Plan, device: torch.device, samples: Samples) -> Prediction:
    try:
        if plan.layout.stages > 1:
            return predict_stages(config, plan, device, samples)
        tracker = make_tracker(device.type)
        with fake_ranks(plan.world_size if plan.layout.shard > 1 else 1), torch.random.fork_rng(devices=[]):
            mesh = Mesh(plan.layout, 0, torch.device("cpu"))
            weights = mesh.weights if plan.layout.shard > 1 else None  # made of real tensors: before the fake mode
            part = find_part(plan.layout, 0)
            with make_fake_mode():
                rank = _build(config, plan, device, samples, weights, part)
                between = _run(
                    rank, AveragedWeights(rank.model, config.ema.decay, mesh) if config.ema else None, tracker
                )
    except TuttiError:
        raise
    except Exception as error:
        if cause_of(error) is Cause.OUT_OF_MEMORY:
            raise
        raise ConfigError(
            f"the memory of {config.model.name} on {config.data.name} cannot be predicted: its step failed on tensors "
            f"without data with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return summarise(config, plan, device.type, tracker, between, samples)


@dataclass(frozen=True)
class PassMemory:
    """What one forward pass needs besides weights: its peak, and the elements of its largest tensor."""

    peak_bytes: int
    most_elements: int


def predict_pass(
    make_model: Callable[[], nn.Module], shape: Sequence[int], precision: str, device: str, lays_out: bool = False
) -> PassMemory:
    """The memory of a forward pass without gradients, for inputs of a shape in float32; no process group is needed.

    `lays_out` is for the channels-last layout. Errors are those of the model, which may not run on tensors without
    data.
    """
    tracker = make_tracker(device)
    with torch.random.fork_rng(devices=[]), make_fake_mode(), torch.no_grad():
        model, inputs = make_model().eval(), torch.empty(tuple(shape))
        if lays_out:
            put_channels_last(model)
            inputs = channels_last(inputs)
        weights = [*model.parameters(), *model.buffers()]
        tracker.mark(weights, PARAMETERS)
        tracker.mark([inputs], BATCH)
        with tracked(tracker, device), autocast(precision, torch.device("cpu")):
            tracker.begin("forward", ACTIVATIONS)
            outputs = model(inputs)
        del outputs
    peak = tracker.peak()
    largest = max([tracker.most_elements, inputs.numel()])
    return PassMemory(peak.num_bytes - peak.kinds[PARAMETERS], largest)


# What a rank has.


@dataclass(frozen=True)
class _Rank:
    """The parts of a rank, of tensors without data, and what it does with them in a step."""

    device: str
    model: nn.Module
    criterion: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Any, Any]]  # whole batches of the rank, the first of which is trained on
    micro_batch: int
    eval_batch: int
    precision: Callable[[], AbstractContextManager[Any]]
    silence: Callable[[], AbstractContextManager[Any]]
    lay_out: Callable[[Any], Any]
    forward: Callable[[Any], Any]  # of the model, also on a part of a sample
    gather: Callable[[Any, Any], Any] | None  # the whole of a tensor, for metrics, given the inputs
    clip_norm: float | None
    keeps_gradients: bool  # between steps, as the buckets of DDP

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]


def _build(
    config: RunConfig, plan: Plan, device: torch.device, samples: Samples, weights: Any, part: Part | None
) -> _Rank:
    """What `build_parts` and the learner make of a recipe, in the same order."""
    model = build_model(config, plan, device, samples, weights is not None)
    criterion, forward, gather = build_loss(config), model, None
    if part is not None:
        space = prepare_space(config, model, samples.inputs, part, torch.device("cpu"))
        forward = functools.partial(space.run, model)
        if config.metrics and space.gives_parts:
            gather = lambda values, inputs: space.gather(values, inputs.shape[2:])  # noqa: E731
        inputs, targets = part.cut_batch(samples.inputs, samples.targets)
        samples = replace(samples, inputs=inputs, targets=targets)
    precision = functools.partial(autocast, config.precision, torch.device("cpu"))
    if config.parallel.recompute != "none":
        with precision():
            units = recomputed_units(model, config, lambda: forward(repeat(samples.inputs, plan.micro_batch)))
        recompute(units)
    if weights is not None:
        shard_model(model, weights)
    return _Rank(
        device=device.type,
        model=model,
        criterion=criterion,
        optimizer=build_optimizer(config.optim, model),
        batches=make_batches(config, plan, device, samples),
        micro_batch=plan.micro_batch,
        eval_batch=config.batch.eval or plan.micro_batch,
        precision=precision,
        silence=without_reduction(model) if weights is not None else nullcontext,
        lay_out=channels_last if applies(config.speed.channels_last, device) else lambda inputs: inputs,
        forward=forward,
        gather=gather,
        clip_norm=config.optim.clip_norm,
        keeps_gradients=plan.world_size > 1 and weights is None,
    )


# What it does.


def _run(rank: _Rank, averages: AveragedWeights | None, tracker: MemoryTracker) -> int:
    """Make a step after one in which the optimizer has made its state; the bytes that are there after it."""
    mark_rank(rank.model, rank.batches, tracker)
    if averages:
        tracker.mark(averages.state.values(), AVERAGES)
    with tracked(tracker, rank.device):
        make_optimizer_state(rank.parameters, rank.optimizer, tracker)
        _end_step(rank, tracker)
        tracker.restart()
        _step(rank, tracker)
        between = sum(tracker.now().values())
        if averages:
            averages.update()
            tracker.begin("validation", AVERAGES)
            with averages.in_use():  # which keeps the trained weights aside
                _validate(rank, tracker)
        elif rank.eval_batch > rank.micro_batch:
            _validate(rank, tracker)
    return between


def _step(rank: _Rank, tracker: MemoryTracker) -> None:
    inputs, targets = (cut_batch(each, rank.micro_batch) for each in rank.batches[0])
    outputs = loss = None  # kept from pass to pass, as the learner does
    last = len(inputs) - 1
    for index in (0, last) if last else (0,):  # the passes between them are like the last
        with nullcontext() if index == last else rank.silence():
            tracker.begin("forward", ACTIVATIONS)
            with rank.precision():
                outputs = rank.forward(rank.lay_out(inputs[index]))
                loss = rank.criterion(outputs, targets[index])
            tracker.begin("backward", TEMPORARIES)
            loss.backward()
        tracker.mark((each.grad for each in rank.parameters), GRADIENTS)
        _measure(rank, tracker, inputs[index], outputs, targets[index])
    del outputs, loss
    tracker.begin("optimizer", TEMPORARIES)
    if rank.clip_norm is not None:
        nn.utils.clip_grad_norm_(rank.parameters, rank.clip_norm)
    rank.optimizer.step()
    _end_step(rank, tracker)


def _measure(rank: _Rank, tracker: MemoryTracker, inputs: Any, outputs: Any, targets: Any) -> None:
    """Gather whole samples for metrics, where ranks have parts of them."""
    if rank.gather is not None:
        tracker.begin("metrics", TEMPORARIES)
        with torch.no_grad():
            _ = rank.gather(outputs, inputs), rank.gather(targets, inputs)


def _end_step(rank: _Rank, tracker: MemoryTracker) -> None:
    rank.optimizer.zero_grad(set_to_none=not rank.keeps_gradients)
    if rank.keeps_gradients:
        tracker.mark((each.grad for each in rank.parameters), GRADIENTS)


def _validate(rank: _Rank, tracker: MemoryTracker) -> None:
    rank.model.eval()
    tracker.begin("validation", BATCH)
    one = tree_map_only(torch.Tensor, lambda each: each[:1], rank.batches[0])
    inputs, targets = (repeat(each, rank.eval_batch) for each in one)
    tracker.begin("validation", ACTIVATIONS)
    with torch.no_grad(), rank.precision():
        outputs = rank.forward(rank.lay_out(inputs))
        rank.criterion(outputs, targets)
    _measure(rank, tracker, inputs, outputs, targets)
