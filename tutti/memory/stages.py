"""Predicts the memory of the ranks of a pipeline: each stage makes a step of its schedule on tensors without data."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tutti.config.layout import Layout
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.memory.rank import (
    Prediction,
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
from tutti.memory.samples import Samples
from tutti.memory.tracking import ACTIVATIONS, BATCH, GRADIENTS, TEMPORARIES, MemoryTracker, make_fake_mode
from tutti.optim.optimizers import build_optimizer, hidden_weights
from tutti.parallel.chain import Layer, check_chain, name_chain, run_layer
from tutti.parallel.mesh import Mesh
from tutti.parallel.recompute import recompute
from tutti.parallel.stages import Pipeline
from tutti.ranks.device import applies
from tutti.train.learner import autocast, channels_last
from tutti.train.spread import recomputed_units
from tutti.train.torch import build_loss

_CHUNKS = 2  # parts of the model on each rank, in schedules that interleave them
Format = list[tuple[str, list[int]]]  # type and shape of each tensor that a part takes or gives


def predict_stages(config: RunConfig, plan: Plan, device: torch.device, samples: Samples) -> Prediction:
    """The memory of the rank whose stage needs most; the model is cut by floating-point operations."""
    if not isinstance(samples.inputs, torch.Tensor):
        kind = type(samples.inputs).__name__
        raise ConfigError(f"parallel.stages with inputs of type {kind}: expected one tensor a batch.")
    found, layers = [], []
    with torch.random.fork_rng(devices=[]):
        for stage in range(plan.layout.stages):
            tracker = make_tracker(device.type)
            with make_fake_mode():
                built = _build(config, plan, device, samples, stage, layers, tracker)
                layers = built.layers
                between = _run(built, tracker)
            found.append(summarise(config, plan, device.type, tracker, between, samples))
    most = max(found, key=lambda each: each.peak_bytes)
    notes = [
        f"stage {found.index(most)} of {len(found)} needs most. Stages are cut by floating-point operations here, and "
        "by measured times in a run, which may cut at other layers"
    ]
    if config.parallel.schedule == "zero_bubble":
        notes.append("parallel.schedule=zero_bubble keeps activations for gradients of weights: estimated")
    return replace(most, notes=(*most.notes, *notes))


@dataclass(frozen=True)
class _Stage:
    """What the rank of a stage has, of tensors without data."""

    device: str
    stage: int
    stages: int
    schedule: str
    passes: int
    model: nn.Module
    pipeline: Pipeline
    layers: list[Layer]
    inputs: Format
    criterion: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Any, Any]]
    micro_batch: int
    eval_batch: int
    precision: Callable[[], AbstractContextManager[Any]]
    lay_out: Callable[[Any], Any]
    clip_norm: float | None
    copies: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def formats(self, part: int) -> Format:
        """What goes into a part, or out of the one before it."""
        return self.layers[self.pipeline.cuts[part - 1][-1]].outputs if part else self.inputs


def _build(
    config: RunConfig,
    plan: Plan,
    device: torch.device,
    samples: Samples,
    stage: int,
    layers: list[Layer],
    tracker: MemoryTracker,
) -> _Stage:
    """What the learner of stages makes of a recipe; rank 0, which has the first stage, weighs all layers first."""
    model = build_model(config, plan, device, samples, sharded=False)
    check_chain(model, config.parallel, plan.layout.stages)
    lay_out = channels_last if applies(config.speed.channels_last, device) else lambda inputs: inputs
    precision = functools.partial(autocast, config.precision, torch.device("cpu"))
    if config.parallel.recompute != "none":
        with precision():
            units = recomputed_units(model, config, lambda: model(repeat(samples.inputs, plan.micro_batch)))
        recompute(units)
    micro = lay_out(repeat(samples.inputs, plan.micro_batch))
    if not layers:
        mark_rank(model, micro, tracker)
        with tracked(tracker, device.type):
            tracker.begin("cut into stages", ACTIVATIONS)
            layers = _weigh(model, micro, precision)
    inputs: Format = [(str(micro.dtype), list(micro.shape))]
    mesh = Mesh(Layout(plan.layout.stages, stages=plan.layout.stages), stage, torch.device("cpu"))
    hidden = hidden_weights(config.optim, model)
    pipeline = Pipeline(model, layers, inputs, mesh, config.parallel)
    return _Stage(
        device=device.type,
        stage=stage,
        stages=plan.layout.stages,
        schedule=config.parallel.schedule,
        passes=plan.passes,
        model=model,
        pipeline=pipeline,
        layers=layers,
        inputs=inputs,
        criterion=build_loss(config),
        optimizer=build_optimizer(config.optim, model, hidden),
        batches=make_batches(config, plan, device, samples),
        micro_batch=plan.micro_batch,
        eval_batch=config.batch.eval or plan.micro_batch,
        precision=precision,
        lay_out=lay_out,
        clip_norm=config.optim.clip_norm,
        copies=plan.layout.copies,
    )


def _weigh(model: nn.Module, micro: torch.Tensor, precision: Callable[[], AbstractContextManager[Any]]) -> list[Layer]:
    """The floating-point operations of each module of a chain, in place of its time, and its outputs."""
    layers, values = [], (micro,)
    for name in name_chain(model):
        given = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in values)
        with FlopCounterMode(display=False) as counter, precision():
            values = run_layer(model, name, given)
        if trained := [each for each in values if each.grad_fn is not None]:
            torch.autograd.backward(trained, [torch.empty_like(each) for each in trained])
        size = sum(each.numel() for each in values)  # of layers without products, which take time too
        weights = sum(each.numel() for each in model.get_submodule(name).parameters() if each.requires_grad)
        outputs = [(str(each.dtype), list(each.shape)) for each in values]
        layers.append(Layer(name, counter.get_total_flops() + size, weights, outputs))
        values = tuple(each.detach() for each in values)
    model.zero_grad()
    return layers


# What it does.

Action = tuple[str, int, int]  # "forward" or "backward", a part of the model, the number of a micro-batch


def plan_actions(schedule: str, stage: int, stages: int, passes: int) -> Iterator[Action]:
    """The passes of a rank in the order of a schedule, as far as its memory depends on it."""
    if schedule == "gpipe":
        yield from (("forward", stage, number) for number in range(passes))
        yield from (("backward", stage, number) for number in range(passes))
        return
    chunks = 1 if schedule == "1f1b" else _CHUNKS
    total = passes * chunks
    forwards = [_place(index, stage, stages, chunks, index // stages % chunks) for index in range(total)]
    backwards = [_place(index, stage, stages, chunks, chunks - 1 - index // stages % chunks) for index in range(total)]
    if schedule == "1f1b":
        ahead = stages - stage
    elif schedule == "interleaved":
        ahead = (chunks - 1) * stages + 2 * (stages - 1 - stage) + 1
    else:  # gradients of weights follow those of inputs by as many micro-batches as there are stages before
        ahead = (chunks - 1) * stages + (stages - 1 - stage) + 1 + stage
    ahead = min(ahead, total)
    for index in range(total + ahead - 1):
        if index < total:
            yield "forward", *forwards[index]
        if index + 1 >= ahead and index + 1 - ahead < total:
            yield "backward", *backwards[index + 1 - ahead]


def _place(index: int, stage: int, stages: int, chunks: int, chunk: int) -> tuple[int, int]:
    """The part and the micro-batch of one of a rank's passes: as many of each part as there are stages, in turn."""
    number = index if chunks == 1 else index // (stages * chunks) * stages + index % stages
    return stage + chunk * stages, number


def _run(rank: _Stage, tracker: MemoryTracker) -> int:
    """Make a step after one in which the optimizer has made its state; the bytes that are there after it."""
    mark_rank(rank.model, rank.batches, tracker)
    started = tracker.peak() if rank.stage == 0 else None
    with tracked(tracker, rank.device):
        make_optimizer_state(rank.parameters, rank.optimizer, tracker)
        rank.optimizer.zero_grad()
        tracker.restart()
        buffers = _Buffers(rank, tracker)
        _step(rank, buffers, tracker)
        between = sum(tracker.now().values())
        if rank.eval_batch > rank.micro_batch:
            _validate(rank, tracker)
    if started is not None:
        tracker.compare(started)
    return between


class _Buffers:
    """What torch allocates once for all micro-batches: the inputs and the gradients that a rank receives."""

    def __init__(self, rank: _Stage, tracker: MemoryTracker) -> None:
        tracker.begin("forward", ACTIVATIONS)
        parts, last, numbers = rank.pipeline.parts, rank.pipeline.count - 1, range(rank.passes)
        received = [(part, number) for part in parts if part for number in numbers]
        self.inputs = {each: _empty(rank.formats(each[0]), grows=True) for each in received}
        sent = [(part, number) for part in parts if part < last for number in numbers]
        self.gradients = {each: _empty(rank.formats(each[0] + 1), grows=False) for each in sent}


def _empty(formats: Format, grows: bool, count: int | None = None) -> tuple[torch.Tensor, ...]:
    found = []
    for name, shape in formats:
        dtype = getattr(torch, name.removeprefix("torch."))
        size = shape if count is None else [count, *shape[1:]]
        found.append(torch.empty(size, dtype=dtype, requires_grad=grows and dtype.is_floating_point))
    return tuple(found)


def _step(rank: _Stage, buffers: _Buffers, tracker: MemoryTracker) -> None:
    inputs, targets = (cut_batch(each, rank.micro_batch) for each in rank.batches[0])
    inputs = [rank.lay_out(each) for each in inputs]
    kept: dict[tuple[int, int], Any] = {}
    last = rank.pipeline.count - 1
    for kind, part, number in plan_actions(rank.schedule, rank.stage, rank.stages, rank.passes):
        place = part, number
        if kind == "forward":
            tracker.begin("forward", ACTIVATIONS)
            with rank.precision():
                outputs = rank.pipeline.parts[part](*(buffers.inputs[place] if part else (inputs[number],)))
                kept[place] = (outputs, rank.criterion(outputs, targets[number])) if part == last else outputs
            del outputs
        else:
            tracker.begin("backward", TEMPORARIES)
            outputs = kept.pop(place)
            if part == last:
                outputs[1].backward()
            else:
                _backward(outputs if isinstance(outputs, tuple) else (outputs,), buffers.gradients[place])
            del outputs
            tracker.mark((each.grad for each in rank.parameters), GRADIENTS)
    for received in buffers.inputs.values():
        for each in received:
            each.grad = None
    tracker.begin("optimizer", TEMPORARIES)
    if rank.copies > 1:
        flat = torch.cat([each.grad.reshape(-1) for each in rank.parameters if each.grad is not None])
        del flat
    if rank.clip_norm is not None:
        nn.utils.clip_grad_norm_(rank.parameters, rank.clip_norm)
    rank.optimizer.step()
    rank.optimizer.zero_grad()


def _backward(outputs: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
    pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if out.grad_fn is not None]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


def _validate(rank: _Stage, tracker: MemoryTracker) -> None:
    rank.model.eval()
    with torch.no_grad(), rank.precision():
        for part, chain in rank.pipeline.parts.items():
            tracker.begin("validation", BATCH)
            given = _empty(rank.formats(part), grows=False, count=rank.eval_batch)
            tracker.begin("validation", ACTIVATIONS)
            chain(*given)
