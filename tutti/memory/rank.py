"""The parts of a rank as tensors without data, which predictions share, and what their tracker has found."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tutti.config import parts
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.memory.samples import Samples
from tutti.memory.tracking import BATCH, BUFFERS, OPTIMIZER, PARAMETERS, WORKSPACE, MemoryTracker
from tutti.ranks.device import applies
from tutti.train.build import choose_prefetch
from tutti.train.learner import put_channels_last

DATA = "data"  # samples that stay on the device
_CUBLAS_BYTES = 80 << 20  # two workspaces of a GPU's matrix products, of which each thread has its own


@dataclass(frozen=True)
class Prediction:
    """The memory of one rank: its peak, of which kinds that is and when, and what is left between steps."""

    device: str
    ranks: int
    micro_batch: int
    per_rank_batch: int
    peak_bytes: int
    phase: str  # of a step, in which the peak is
    kinds: dict[str, int]  # bytes at the peak
    between_bytes: int  # after a step
    notes: tuple[str, ...] = ()


def build_model(config: RunConfig, plan: Plan, device: torch.device, samples: Samples, sharded: bool) -> nn.Module:
    """The model of a rank, as `build_parts` makes it."""
    model = parts.call(config.model.locate(), "model", config.model.options(), **samples.shapes)
    if applies(config.speed.channels_last, device) and not sharded:
        put_channels_last(model)
    if isinstance(getattr(model, "fold", None), bool):
        model.fold = applies(config.speed.fold, device) and plan.layout.parts == 1
    return model


def make_batches(config: RunConfig, plan: Plan, device: torch.device, samples: Samples) -> list[tuple[Any, Any]]:
    """The batches that a rank holds at a time: the one it trains on, those ahead, and the one that is being made."""
    ahead, count = choose_prefetch(config, device), plan.per_rank_batch
    return [
        (repeat(samples.inputs, count), repeat(samples.targets, count)) for _ in range(1 + (ahead + 1 if ahead else 0))
    ]


def repeat(sample: Any, count: int) -> Any:
    """A batch without data of so many samples like this one."""
    return tree_map_only(torch.Tensor, lambda one: torch.empty((count, *one.shape[1:]), dtype=one.dtype), sample)


def cut_batch(batch: Any, size: int) -> list[Any]:
    """Micro-batches, as views of a batch."""
    counts = [len(each) // size for each in tensors_of(batch)]
    return [
        tree_map_only(torch.Tensor, lambda each, at=index * size: each.narrow(0, at, size), batch)
        for index in range(counts[0])
    ]


def tensors_of(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, values)
    return found


def make_tracker(device: str) -> MemoryTracker:
    """A tracker of the memory of a kind of device."""
    return MemoryTracker(convolution_workspace if device == "cuda" else None)


@contextmanager
def tracked(tracker: MemoryTracker, device: str) -> Iterator[None]:
    """Have a tracker see what is computed, as on a kind of device."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a run gives them too
        if device == "cuda":
            stack.enter_context(_FusedAttention())
        stack.enter_context(tracker)
        yield


class _FusedAttention(TorchFunctionMode):
    """Attention without dropout: with it the CPU keeps whole matrices of weights, which the kernels of GPUs do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) > 4:
                del kwargs["dropout_p"]
        return func(*args, **kwargs)


def mark_rank(model: nn.Module, batches: Any, tracker: MemoryTracker) -> None:
    """Have a tracker know what is there before a step."""
    tracker.mark(model.parameters(), PARAMETERS)
    tracker.mark(model.buffers(), BUFFERS)
    tracker.mark(tensors_of(batches), BATCH)


def make_optimizer_state(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, tracker: MemoryTracker
) -> None:
    """Make the state of an optimizer by a step; gradients are left."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tracker.mark(tensors_of(list(optimizer.state.values())), OPTIMIZER)


def summarise(
    config: RunConfig, plan: Plan, device: str, tracker: MemoryTracker, between: int, samples: Samples
) -> Prediction:
    """What a tracker has found in the steps of a rank, and what libraries need besides."""
    peak = tracker.peak()
    workspace = _CUBLAS_BYTES if tracker.multiplies and device == "cuda" else 0
    kinds = peak.kinds | {WORKSPACE: peak.kinds[WORKSPACE] + workspace}
    notes = list(samples.notes)
    if applies(config.speed.compile, torch.device(device)):
        notes.append("speed.compile is not predicted: the memory is that of uncompiled steps, which need more")
    return Prediction(
        device=device,
        ranks=plan.world_size,
        micro_batch=plan.micro_batch,
        per_rank_batch=plan.per_rank_batch,
        peak_bytes=peak.num_bytes + workspace,
        phase=peak.phase,
        kinds=kinds,
        between_bytes=between + workspace,
        notes=tuple(notes),
    )


def add_data(found: Prediction, num_bytes: int) -> Prediction:
    """A prediction with samples that stay in the memory of the device."""
    return replace(
        found,
        kinds=found.kinds | {DATA: num_bytes},
        peak_bytes=found.peak_bytes + num_bytes,
        between_bytes=found.between_bytes + num_bytes,
    )


def convolution_workspace(operands: Sequence[torch.Tensor]) -> int:
    """The bytes that cuDNN may use in a convolution of these operands, in the order of the operator's arguments.

    Contiguous float32 operands are copied into the layout of the kernels; the gradient of a weight of 16 bits is summed
    in float32.
    """
    first, *others = [each for each in operands if each.ndim > 2]
    if first.dtype == torch.float32 and first.stride(1) != 1:
        return sum(each.nbytes for each in (first, *others[:2]))
    is_backward = len(others) > 2
    return 8 * others[1].numel() if is_backward else 0
