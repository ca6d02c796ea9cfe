"""Muon: momentum whose matrices are orthogonalised, beside another optimizer for what is not a hidden matrix."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from tutti.errors import ConfigError, nearest
from tutti.optim.layerwise import LayerwiseOptimizer, gradients_of, norms_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial that drives singular values towards 1
_OPTIONS = ("momentum", "nesterov", "weight_decay", "normalize", "ns_steps", "ns_precision", "adjust_lr")
_LEAST_NORM = 1e-7
_AT_ONCE = 1 << 22  # elements that are orthogonalised together: more would take memory and no less time
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LAYERS = (nn.Linear, _ConvNd, nn.MultiheadAttention, *_EMBEDDINGS)


class Muon(LayerwiseOptimizer):
    """Momentum whose matrices are orthogonalised; weights of more dimensions are matrices of (first, all others).

    A vector is a matrix of one column. `others` updates further parameters: its rate changes in proportion to `lr`. All
    parameters are in one group and one state, so that a checkpoint does not depend on which ranks have which of them.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_precision: str | None = None,
        adjust_lr: str = "original",
        normalize: bool = False,
        others: torch.optim.Optimizer | None = None,
    ) -> None:
        matrices = list(params)
        further = [each for group in others.param_groups for each in group["params"]] if others else []
        options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "normalize": normalize}
        options |= {"ns_steps": ns_steps, "ns_precision": ns_precision, "adjust_lr": adjust_lr}
        super().__init__([*matrices, *further], {"lr": lr, **options})
        self._batches = list(_batch_alike(matrices))
        self._others = others
        self._ratios = [group["lr"] / lr for group in others.param_groups] if others else []

        self._move: Callable[..., None] = _move

    def compile(self) -> None:
        """Have the updates of matrices compiled on a GPU, by a step of copies.

        They are a hundred small operations, which take longer to start than to run.
        """
        if any(not each.is_cuda or hasattr(each, "placements") for batch in self._batches for each in batch):
            return
        self._move = torch.compile(_move, dynamic=False, fullgraph=True)
        copies = [[nn.Parameter(each.detach().clone()) for each in batch] for batch in self._batches]
        likes = [[[torch.zeros_like(each) for each in batch] for batch in self._batches] for _ in range(2)]
        with torch.no_grad():
            self._move(copies, *likes, torch.tensor(0.0), _options(self.param_groups[0]))

    def update_group(self, group: dict[str, Any]) -> None:
        batches = [[each for each in batch if each.grad is not None] for batch in self._batches]
        batches = [batch for batch in batches if batch]
        gradients = [gradients_of(batch) for batch in batches]
        velocities = [self.buffers(batch, "momentum") for batch in batches]
        lr = group["lr"] if self._move is _move else torch.tensor(group["lr"])  # a number would be compiled in
        self._move(batches, gradients, velocities, lr, _options(group))
        if self._others is not None:
            self._others.state = self.state  # loading a state replaces it
            for given, ratio in zip(self._others.param_groups, self._ratios, strict=True):
                given["lr"] = group["lr"] * ratio
            self._others.step()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _OPTIONS}


def _move(
    batches: list[list[torch.Tensor]],
    gradients: list[list[torch.Tensor]],
    velocities: list[list[torch.Tensor]],
    lr: float | torch.Tensor,
    options: dict[str, Any],
) -> None:
    """Updates parameters, those of one shape together; every rank that holds a part of them enters."""
    for parameters, grads, momenta in zip(batches, gradients, velocities, strict=True):
        _move_alike(parameters, grads, momenta, lr, **options)


def _move_alike(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    velocities: list[torch.Tensor],
    lr: float | torch.Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    normalize: bool,
    ns_steps: int,
    ns_precision: str | None,
    adjust_lr: str,
) -> None:
    torch._foreach_lerp_(velocities, gradients, 1 - momentum)
    directions = torch._foreach_lerp(gradients, velocities, momentum) if nesterov else velocities
    dtype = _DTYPES[ns_precision or ("fp32" if parameters[0].device.type == "cpu" else "bf16")]
    updates = orthogonalize(torch.stack([_as_matrix(each.to(dtype)) for each in directions]), ns_steps)
    del directions
    if parameters[0].ndim > 1:
        if normalize:
            norms = norms_of(parameters)
            moves = (norms > 0) & (lr > 0)  # a rate of 0 leaves weights as they are
            ratios = torch.where(moves, math.sqrt(parameters[0].shape[0]) / norms, 1.0)
            torch._foreach_mul_(parameters, list(ratios.unbind()))
        if weight_decay:
            torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    steps = [_as_part(update, parameter) for update, parameter in zip(updates, parameters, strict=True)]
    scale = lr * find_factor(adjust_lr, *updates.shape[1:])
    if isinstance(scale, torch.Tensor):
        torch._foreach_sub_(parameters, torch._foreach_mul(steps, scale))
    else:
        torch._foreach_add_(parameters, steps, alpha=-scale)


def orthogonalize(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns matrices with the same singular vectors and singular values near 1, by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    if is_tall:
        matrices = matrices.mT
    matrices = matrices / torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = matrices @ matrices.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        matrices = torch.baddbmm(matrices, gram, matrices, beta=a)
    return matrices.mT if is_tall else matrices


def find_factor(rule: str, rows: int, columns: int) -> float:
    """Returns the factor of the learning rate of a matrix."""
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


def _batch_alike(parameters: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Yields parameters that are orthogonalised together: of one shape, type and place, and not too many at once."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for each in parameters:
        mesh, placements = getattr(each, "device_mesh", None), getattr(each, "placements", None)
        alike.setdefault((each.shape, each.dtype, each.device, mesh, placements), []).append(each)
    for found in alike.values():
        count = max(1, _AT_ONCE // max(1, found[0].numel()))
        yield from (found[start : start + count] for start in range(0, len(found), count))


def _as_matrix(tensor: Any) -> torch.Tensor:
    """Returns a whole tensor, also one of which ranks hold parts, as a matrix."""
    whole = tensor.full_tensor() if hasattr(tensor, "placements") else tensor
    return whole.flatten(1) if whole.ndim > 1 else whole.reshape(-1, 1)


def _as_part(matrix: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Returns the part of a matrix that this rank holds of a parameter, in the shape of the parameter."""
    whole = matrix.to(parameter.dtype).reshape(parameter.shape)
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=parameter.placements)


def find_hidden(model: nn.Module) -> frozenset[str]:
    """Returns the names of the hidden weights of a model: those that it names itself in `hidden_weights()`.

    Without this method they are the weights of linear layers, convolutions and attention, except in the first and in
    the last layer, in the order in which the model defines them. An embedding is a layer without hidden weights.
    """
    named: Callable[[], Iterable[str]] | None = getattr(model, "hidden_weights", None)
    if named is not None:
        return _check_named(model, named())
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, _LAYERS)]
    inner = [(name, each) for name, each in layers[1:-1] if not isinstance(each, _EMBEDDINGS)]
    taken = {id(weight) for each in layers if each not in inner for weight in each[1].parameters(recurse=False)}
    return frozenset(
        f"{name}.{kind}" if name else kind
        for name, layer in inner
        for kind, weight in layer.named_parameters(recurse=False)
        if kind.endswith("weight") and weight.ndim > 1 and weight.requires_grad and id(weight) not in taken
    )


def _check_named(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    known = {name: each.ndim for name, each in model.named_parameters()}
    for name in (names := frozenset(names)):
        if known.get(name, 0) < 2:
            kind = type(model).__name__
            given = f"of {known[name]} dimension(s)" if name in known else "which is no parameter"
            raise ConfigError(
                f"{kind}.hidden_weights() names {name!r}, {given}: expected parameters of {kind} with two or more "
                f"dimensions.{nearest(name, known)}"
            )
    return names
