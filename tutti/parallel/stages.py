"""Pipeline parallelism: the layers of a model in stages on as many ranks, through which micro-batches pass."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tutti.config.layout import chunks_per_rank
from tutti.config.schema import ParallelConfig
from tutti.parallel.chain import Layer, Tensors, cut, run_layer
from tutti.parallel.mesh import Mesh

_TYPES = {
    str(dtype): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}


class OtherStage(nn.Module):
    """Stands where a model has a module that another rank holds."""

    def __init__(self, name: str, stage: int) -> None:
        super().__init__()
        self._place = f"{name} is in stage {stage}, on another rank"

    def forward(self, *_: Any) -> Any:
        """Refuses to compute."""
        raise RuntimeError(f"{self._place}: this rank has a part of the model. Load a checkpoint into a whole model.")


class Chain(nn.Module):
    """The modules of one part of a model, one after another."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.get_submodule(name) for name in names)
        self._runs = [functools.partial(run_layer, model, name) for name in names]

    def forward(self, *inputs: torch.Tensor) -> Any:
        values: Tensors = inputs
        for run in self._runs:
            values = run(values)
        passed = {id(each) for each in inputs}  # for a later part, and a leaf of this one's graph
        values = tuple(each.view_as(each) if id(each) in passed else each.contiguous() for each in values)
        first, *others = values
        return values if others else first


Around = Callable[[int, int], AbstractContextManager[Any]]  # of a part of the model and the number of a micro-batch


class WatchedStage(PipelineStage):
    """A part of a model whose every pass of a micro-batch runs in a context of ours."""

    inputs: Sequence[Any] = ()  # micro-batches of the first part
    around_forward: Around
    around_backward: Around

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *more: Any, **options: Any) -> Any:
        """The forward pass of a micro-batch."""
        given = (self.inputs[fwd_chunk_id],) if self.is_first else args
        with self.around_forward(self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, given, *more, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *more: Any, **options: Any) -> None:
        """The backward pass of a micro-batch, whole or for its inputs only."""
        with self.around_backward(self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *more, **options)
            found = self.bwd_cache.get(bwd_chunk_id, ())  # ranks send memory as it lies
            self.bwd_cache[bwd_chunk_id] = tuple(None if each is None else each.contiguous() for each in found)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *more: Any, **options: Any) -> None:
        """The backward pass of a micro-batch for its weights, where it is apart."""
        with self.around_backward(self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *more, **options)


_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class Pipeline:
    """The parts of a model on this rank, and how micro-batches pass through them and those of other ranks.

    Part i is on rank i modulo the number of stages; with an interleaved schedule each rank has several parts.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        inputs: list[tuple[str, list[int]]],
        mesh: Mesh,
        config: ParallelConfig,
    ) -> None:
        self.mesh, self.group, self.ranks = mesh, mesh.stages, mesh.layout.stages
        self.stage = mesh.layout.stage(mesh.rank)
        self.count = self.ranks * chunks_per_rank(config)
        self.cuts = cut(layers, self.count)
        self.parts = {part: self._chain(model, layers, part) for part in range(self.stage, self.count, self.ranks)}
        self._config = config
        self._formats = [inputs, *(layers[each[-1]].outputs for each in self.cuts)]
        self._names = [[layers[index].name for index in each] for each in self.cuts]
        for part, names in enumerate(self._names):
            if part not in self.parts:
                _leave_out(model, names, part % self.ranks)
        self._stages: list[WatchedStage] = []
        self._schedule: Any = None

    def describe(self) -> tuple[str, ...]:
        """The layers of each stage, in words."""
        parts = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in self._names]
        return tuple(" and ".join(parts[stage :: self.ranks]) for stage in range(self.ranks))

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last part, which gives the outputs."""
        return self.count - 1 in self.parts

    def prepare(
        self, passes: int, loss: Callable[[Any, int], torch.Tensor], around_forward: Around, around_backward: Around
    ) -> None:
        """Make the schedule of a step; `loss` is given the output of a micro-batch and its number."""
        for part, chain in self.parts.items():
            stage = WatchedStage(
                chain,
                part,
                self.count,
                self.mesh.device,
                input_args=self._examples(part),
                output_args=self._examples(part + 1),
                group=self.group,
            )
            stage.around_forward, stage.around_backward = around_forward, around_backward
            self._stages.append(stage)
        kind = _SCHEDULES[self._config.schedule]
        given = self._stages if chunks_per_rank(self._config) > 1 else self._stages[0]
        # Losses are divided by the number of passes as without stages, so that gradients need no scaling.
        self._schedule = kind(given, passes, loss_fn=lambda out, number: loss(out, int(number)), scale_grads=False)

    def _examples(self, place: int) -> Tensors:
        """What goes into a part, or out of the one before it, without memory."""
        is_sent, found = 0 < place < self.count, []
        for name, shape in self._formats[place]:
            dtype = _TYPES[name]
            grows = is_sent and dtype.is_floating_point  # has a gradient
            found.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=grows))
        return tuple(found)

    def step(self, inputs: Sequence[torch.Tensor]) -> None:
        """Forward and backward passes of all micro-batches through all parts."""
        numbers = torch.arange(len(inputs))  # stand for inputs and targets, so that nothing is copied
        for stage in self._stages:
            stage.inputs = inputs
        given = (numbers,) if 0 in self.parts else ()
        self._schedule.step(*given, target=numbers if self.is_last else None, return_outputs=False)
        for stage in self._stages:
            stage.inputs = ()

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor, autocast: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor | None:
        """The outputs of a batch of any size on the rank with the last part, None on the others; all ranks enter."""
        values: Tensors = (inputs,)
        for part, chain in self.parts.items():
            if part:
                values = self._receive(part)
            with autocast():
                outputs = chain(*values)
            values = outputs if isinstance(outputs, tuple) else (outputs,)
            if part + 1 < self.count:
                self._send(values, part + 1)
        return values[0] if self.is_last else None

    def _peer(self, part: int) -> int:
        return self.mesh.rank + (part % self.ranks - self.stage) * self.mesh.layout.tensor

    def _send(self, values: Tensors, part: int) -> None:
        """Send tensors of any shape to a part."""
        for each in values:
            header = torch.zeros(_HEADER, dtype=torch.int64)
            header[: 2 + each.ndim] = torch.tensor([list(_TYPES.values()).index(each.dtype), each.ndim, *each.shape])
            dist.send(header.to(self.mesh.device), self._peer(part), group=self.group)
            dist.send(each.contiguous(), self._peer(part), group=self.group)

    def _receive(self, part: int) -> Tensors:
        """What the part before this one sends."""
        found = []
        for _ in self._formats[part]:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self.mesh.device)
            dist.recv(header, self._peer(part - 1), group=self.group)
            kind, dims, *shape = header.tolist()
            values = torch.empty(shape[:dims], dtype=list(_TYPES.values())[kind], device=self.mesh.device)
            dist.recv(values, self._peer(part - 1), group=self.group)
            found.append(values)
        return tuple(found)

    def _chain(self, model: nn.Module, layers: Sequence[Layer], part: int) -> Chain:
        return Chain(model, [layers[index].name for index in self.cuts[part]])


_HEADER = 12  # numbers: the type, the dimensions and their sizes


def _leave_out(model: nn.Module, names: Sequence[str], stage: int) -> None:
    """Free the modules that another rank has; those that stay keep their names."""
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, OtherStage(name, stage))
