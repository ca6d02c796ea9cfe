"""Whether the memory of a run could matter: more bytes than a rank needs, from the shapes of its model alone."""

import math
from typing import Any

import torch
from torch import nn

from tutti.config import parts
from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.errors import TuttiError
from tutti.memory.samples import describe_samples, resident_bytes, tells_shape
from tutti.ranks.device import uses_gpus
from tutti.train.memory import device_memory

_STATES = 6  # weights, gradients and their buckets, two states of an optimizer, and temporaries of its step
_AVERAGES = 2  # averaged weights, and the trained ones that are kept aside in validation
_ORTHOGONAL = 6  # times what Muon orthogonalises at once: small matrices together, or one that is larger
_ORTHOGONAL_BYTES = 16 << 20
_KEPT = 4  # times an output of a layer: before and after its activation, and their gradients
_BATCHES = 4  # that are loaded ahead or kept
_PROCESS_BYTES = 2 << 30  # Python, torch, and CUDA's context


def choose_kind(config: RunConfig) -> str:
    """The kind of device that ranks use here."""
    return "cuda" if uses_gpus(config.runtime) else "cpu"


def could_matter(config: RunConfig, ranks: int, local_size: int) -> bool:
    """Return whether a run may need most of the memory of its devices, as far as shapes tell it.

    Only parts of tutti itself are asked, whose shapes are known before any data is read: the code of users runs in
    their ranks alone.
    """
    if config.framework != "torch" or config.step or ":" in config.model.name or not tells_shape(config):
        return False
    try:
        memory = device_memory(choose_kind(config), local_size)
        return memory is not None and estimate_most(config, ranks) > memory
    except TuttiError:  # which the ranks tell
        return False


def estimate_most(config: RunConfig, ranks: int) -> int:
    """More bytes than a rank needs: as if every layer gave an output for each position of its samples."""
    samples = describe_samples(config)
    plan = make_plan(config, ranks, samples.count)
    with torch.device("meta"):
        model: Any = parts.call(config.model.locate(), "model", config.model.options(), **samples.shapes)
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    features = sum(max(each.shape[:2]) for each in weights if each.ndim > 1)
    sizes = samples.inputs.shape[1:]
    positions = math.prod(sizes[1:] if len(sizes) > 1 else sizes)
    activations = 4 * _KEPT * features * positions * max(plan.micro_batch, config.batch.eval or 1)
    batches = _BATCHES * plan.per_rank_batch * (samples.inputs.nbytes + samples.targets.nbytes)
    states = _STATES + (_AVERAGES if config.ema else 0)
    most = _PROCESS_BYTES + states * sum(each.nbytes for each in weights) + activations + batches
    most += resident_bytes(config, plan, choose_kind(config))
    if config.optim.name == "muon":
        most += _ORTHOGONAL * max([_ORTHOGONAL_BYTES, *(each.nbytes for each in weights)])
    return most
