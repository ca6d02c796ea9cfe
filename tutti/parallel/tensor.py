"""Tensor parallelism: ranks hold columns or rows of the matrices of a model, and compute each sample together.

All parameters are DTensors, so that optimizers, clipping and checkpoints see the whole model. Layers that are split run
on DTensors, by the styles of torch; all others compute on plain tensors, which are the same on every rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from tutti.errors import ConfigError

# What a model's tensor_plan() may say of a layer: which part of it a rank has, and of its inputs and outputs.
KINDS: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "columns": lambda _: ColwiseParallel(),  # takes the whole input, gives a part of the outputs
    "gathered columns": lambda _: ColwiseParallel(output_layouts=Replicate()),  # the same, and gives all outputs
    # Takes a part of the input, or all tokens where it is an embedding; gives all outputs.
    "rows": lambda module: RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else None),
}


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """The layers that a model has split, and how."""
    named: Callable[[], Mapping[str, str]] | None = getattr(model, "tensor_plan", None)
    if named is None:
        raise ConfigError(
            f"parallel.tensor with {type(model).__name__}: expected a model with the method tensor_plan(), which names "
            "the linear layers to split, as {'mlp.up': 'columns', 'mlp.down': 'rows'}. Choose a transformer, add "
            "the method, or leave parallel.tensor out."
        )
    return named()


def check_tensor(model: nn.Module, degree: int) -> None:
    """Refuse a model whose layers cannot be split into so many parts."""
    kind, heads = type(model).__name__, getattr(model, "heads", None)
    if isinstance(heads, int) and heads % degree:
        raise ConfigError(
            f"parallel.tensor={degree} with {heads} heads: expected a divisor of {heads}, since a rank has whole "
            f"heads. Set {_divisors(heads)}, or model.heads to a multiple of {degree}."
        )
    for name, how in plan_of(model).items():
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                f"{kind}.tensor_plan() names {name!r}: expected the name of a module of {kind}. {error}."
            ) from error
        if how not in KINDS:
            raise ConfigError(
                f"{kind}.tensor_plan() has {how!r} for {name}: expected one of {', '.join(map(repr, KINDS))}."
            )
        if not isinstance(layer, nn.Linear | nn.Embedding):
            raise ConfigError(
                f"{kind}.tensor_plan() names {name}, of type {type(layer).__name__}: expected an nn.Linear or an "
                "nn.Embedding."
            )
        _check_size(name, layer, how, degree)
    _check_shared(model)


def _check_size(name: str, layer: nn.Linear | nn.Embedding, how: str, degree: int) -> None:
    if isinstance(layer, nn.Linear):
        size = layer.in_features if how == "rows" else layer.out_features
    else:
        size = layer.num_embeddings if how == "rows" else layer.embedding_dim
    if size % degree:
        what = "rows" if how == "rows" else "columns"
        raise ConfigError(
            f"parallel.tensor={degree} with {name}, which has {size} {what}: expected a divisor of {size}. "
            f"Set {_divisors(size)}, or change the size of the layer to a multiple of {degree}."
        )


def _divisors(number: int) -> str:
    found = [each for each in range(1, number + 1) if number % each == 0]
    return f"parallel.tensor={' or '.join(map(str, found[:6]))}"


def _check_shared(model: nn.Module) -> None:
    """Refuse a parameter of two layers of which one is split."""
    split = tuple(f"{name}." for name in plan_of(model))
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = names.setdefault(id(parameter), name)
        if other != name and (name.startswith(split) or other.startswith(split)):
            raise ConfigError(
                f"parallel.tensor with {type(model).__name__}: {name} and {other} are one parameter, and a layer that "
                "is split has parameters of its own. Use two parameters, or leave the layer out of tensor_plan()."
            )


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters of a model by DTensors, of which this rank has its parts; all ranks of the mesh enter."""
    for name, how in plan_of(model).items():
        layer = model.get_submodule(name)
        parallelize_module(layer, mesh, KINDS[how](layer), src_data_rank=None)
    copied: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = {name: each for name, each in module.named_parameters(recurse=False) if not isinstance(each, DTensor)}
        for name, parameter in own.items():
            if id(parameter) not in copied:
                value = distribute_tensor(parameter.data, mesh, [Replicate()], src_data_rank=None)
                copied[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module.register_parameter(name, copied[id(parameter)])
        if own:
            module.forward = WithPlainParameters(module, tuple(own), module.forward)


class WithPlainParameters:
    """The forward pass of a module whose own parameters are the same on all ranks, on plain tensors of their values.

    What goes into it is the same on all ranks too, and so are the gradients that it gives to its parameters.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], forward: Callable[..., Any]) -> None:
        self._module, self._names, self._forward = module, names, forward

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        parameters: Any = self._module._parameters
        before = {name: parameters[name] for name in self._names}
        for name, each in before.items():
            parameters[name] = each.to_local(grad_placements=[Replicate()])
        try:
            return self._forward(*inputs, **options)
        finally:
            parameters.update(before)


def held_bytes(parameter: Any) -> int:
    """The bytes of a parameter that the ranks of one part of a layer hold together."""
    mesh, placements = parameter.device_mesh, parameter.placements
    dim = mesh.mesh_dim_names.index("tensor")
    return parameter.nbytes // mesh.size(dim) if isinstance(placements[dim], Shard) else parameter.nbytes
