"""Broadcast of parameters, optimizer state and objects, gathering of objects, and reduction of sparse tensors."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet, global_process_set
from tutti.horovod.torch.ops import Average, Sum, allgather_async, broadcast_async_, synchronize
from tutti.ranks.secret import find_secret

try:
    import cloudpickle as pickle  # pyright: ignore[reportMissingImports]
except ImportError:
    import pickle

# fmt: off
__all__ = [  # in the namespace horovod.torch
    "allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "sparse_allreduce_async",
]
# fmt: on

_PURPOSE = "objects of horovod"  # of the signature
Parameters = dict[str, torch.Tensor] | Sequence[torch.Tensor] | Sequence[tuple[str, torch.Tensor]]


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Broadcast one rank's tensors to all ranks, in place."""
    if isinstance(params, dict):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(
            f"invalid params of type: {type(params)}. Expected a dict such as model.state_dict(), a list of tensors, "
            "or a list of pairs (name, tensor) such as list(model.named_parameters())."
        )
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"params has {type(tensor)} under {name!r}: expected tensors. Use hvd.broadcast_object.")
    sent = [tensor.detach().contiguous() for _, tensor in pairs]
    handles = [broadcast_async_(tensor, root_rank, name) for tensor, (name, _) in zip(sent, pairs, strict=True)]
    for handle in handles:
        synchronize(handle)
    for tensor, (_, own) in zip(sent, pairs, strict=True):
        if tensor.data_ptr() != own.data_ptr():  # it was not contiguous: a copy was sent
            own.detach().copy_(tensor)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast one rank's object to all ranks; on that rank, return the object itself."""
    name = name or "broadcast_object"  # not the type's name: ranks that wait often hold None
    is_root = basics.rank() == root_rank
    content = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(content)])
    synchronize(broadcast_async_(size, root_rank, f"{name}.sz", process_set))
    if not is_root:
        content = torch.empty(int(size), dtype=torch.uint8)
    synchronize(broadcast_async_(content, root_rank, f"{name}.t", process_set))
    return obj if is_root else _from_bytes(content)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks."""
    return gather_objects(obj, name, global_process_set)


def gather_objects(obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Return the objects of the ranks of a process set, in the order of ranks."""
    name = name or "allgather_object"
    content = _to_bytes(obj)
    sizes = allgather_async(torch.tensor([len(content)]), f"{name}.sz", process_set)
    contents = allgather_async(content, f"{name}.t", process_set)
    parts = synchronize(contents).split(synchronize(sizes).tolist())
    return [_from_bytes(part) for part in parts]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up a sparse tensor over ranks; return a function that waits for the sum, or the mean."""
    if op not in (Average, Sum):
        raise NotImplementedError(f"op={op} on a sparse tensor: expected Average or Sum. Make it dense first.")
    tensor = tensor.coalesce()
    indices = allgather_async(tensor.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor.values().contiguous(), f"{name}.values", process_set)

    def wait() -> torch.Tensor:
        gathered = synchronize(values)
        if op == Average:
            gathered = gathered / process_set.size()
        where = synchronize(indices).t()
        # Equal indices of several ranks are added up, in the order of ranks.
        return torch.sparse_coo_tensor(where, gathered, tensor.shape, check_invariants=False).coalesce()

    return wait


def empty_sparse(parameter: torch.Tensor, sparse_dim: int = 1) -> torch.Tensor:
    """Return a sparse gradient without rows."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Broadcast the state and the options of one rank's optimizer; an optimizer without state creates it first."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: expected any other optimizer.")
    sizes = allgather_object([len(group["params"]) for group in optimizer.param_groups], "optimizer_groups")
    if sizes != [sizes[root_rank]] * len(sizes):
        raise ValueError(
            f"the numbers of parameters in the groups of the optimizer differ between ranks: {sizes}. "
            "Expected the same on all ranks."
        )
    if not optimizer.state:
        _create_state(optimizer, model)
    options, states = broadcast_object(_described(optimizer), root_rank, "optimizer_state")
    if basics.rank() != root_rank:
        _adopt(optimizer, options, states)
    occurrences: dict[str, int] = defaultdict(int)
    tensors = []
    for parameter, described in zip(_parameters(optimizer), states, strict=True):
        for key in (key for key, value in described.items() if isinstance(value, _TensorLike)):
            occurrences[key] += 1
            tensors.append((f"{key}.{occurrences[key]}", optimizer.state[parameter][key]))
    broadcast_parameters(tensors, root_rank)


@dataclass(frozen=True)
class _TensorLike:
    """Describes a tensor of the state, which is broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    def fits(self, found: Any) -> bool:
        return isinstance(found, torch.Tensor) and tuple(found.shape) == self.shape and found.dtype == self.dtype


def _create_state(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
    """Make one step with zero gradients, and restore the weights afterwards: weight decay changes them."""
    sparse = _sparse_weights(model) if isinstance(optimizer, torch.optim.SGD) else set()
    parameters = _parameters(optimizer)
    weights = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        if parameter.requires_grad:
            is_sparse = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = empty_sparse(parameter) if is_sparse else torch.zeros_like(parameter)
    # With the optimizer's own class: the step of a distributed optimizer waits for ranks that may have state already.
    own_class: Any = getattr(optimizer, "wrapped_class", type(optimizer))
    own_class.step(optimizer)
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)


def _sparse_weights(model: nn.Module | None) -> set[torch.Tensor]:
    modules = model.modules() if model is not None else ()
    return {m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _described(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the options of all groups, and the state of all parameters without the contents of tensors."""
    options = [
        {key: _on_cpu(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    states = [optimizer.state.get(parameter, {}) for parameter in _parameters(optimizer)]
    return options, [{key: _without_content(value) for key, value in state.items()} for state in states]


def _without_content(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return _TensorLike(tuple(value.shape), value.dtype, value.device.type == "cpu")
    return _on_cpu(value)  # the size of a sparse tensor differs between ranks


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _adopt(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]], states: list[dict[str, Any]]) -> None:
    """Set options and state as another rank described them; the contents of tensors are broadcast afterwards."""
    for group, described in zip(optimizer.param_groups, options, strict=True):
        for key, value in described.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    for parameter, described in zip(_parameters(optimizer), states, strict=True):
        own = optimizer.state.pop(parameter, {})
        if described:
            optimizer.state[parameter] = {
                key: _allocated(value, own.get(key), parameter) for key, value in described.items()
            }


def _allocated(value: Any, own: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(parameter.device)
    if not isinstance(value, _TensorLike):
        return value
    if value.fits(own):
        return own
    return torch.empty(value.shape, dtype=value.dtype, device="cpu" if value.on_cpu else parameter.device)


def _to_bytes(obj: Any) -> torch.Tensor:
    """Pickle an object, and sign it with the secret of the job."""
    return torch.frombuffer(bytearray(find_secret().sign(pickle.dumps(obj), _PURPOSE)), dtype=torch.uint8)


def _from_bytes(content: torch.Tensor) -> Any:
    """Unpickle an object that a rank of this job has signed; raise ForgedContent for any other."""
    return pickle.loads(find_secret().verify(content.numpy().tobytes(), _PURPOSE))
