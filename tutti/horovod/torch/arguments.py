"""Signatures of collectives, and checks of their arguments; a failed check concerns this rank alone."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from tutti.horovod import basics
from tutti.horovod.basics import ProcessSet
from tutti.horovod.engine.execute import DTYPES, Members, is_power_of_two
from tutti.horovod.engine.messages import AVERAGE, GLOBAL_SET, OP_NAMES, SUM
from tutti.horovod.errors import warn_deprecated

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_REDUCED = {
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
}


def same_arguments(
    template: Callable[Arguments, Any],
) -> Callable[[Callable[..., Result]], Callable[Arguments, Result]]:
    """Give a function that passes its arguments on the signature of another function; its return type stays."""

    def give(function: Callable[..., Result]) -> Callable[Arguments, Result]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(template).replace(return_annotation=returned)
        function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return give


def reduce_op(op: int | None, average: bool | None) -> int:
    """Return the reduction; `average` is the deprecated way to select it."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warn_deprecated("Parameter `average` has been replaced with `op`")
        return AVERAGE if average else SUM
    op = AVERAGE if op is None else op
    if op not in range(len(OP_NAMES)):
        raise ValueError(
            f"op={op} is not a reduction: expected one of {', '.join(f'hvd.{each}' for each in OP_NAMES)}."
        )
    return op


def members_of(process_set: ProcessSet) -> Members:
    """Return the members of a process set that includes this rank."""
    return basics.engine().sets[number_of(process_set)]


def number_of(process_set: ProcessSet) -> int:
    """Return the number of a process set that includes this rank."""
    engine = basics.engine()
    number = process_set.process_set_id
    if number is None or number not in engine.sets:
        raise ValueError(f"{process_set} is not registered, or has been removed.")
    if engine.rank not in engine.sets[number].ranks:
        raise ValueError(f"rank {engine.rank} is not a member of {process_set}: expected one of its ranks.")
    return number


def check_root(root_rank: int, process_set: ProcessSet) -> None:
    """Raise ValueError for a root outside the process set; it is a rank of the whole job."""
    ranks = members_of(process_set).ranks
    if root_rank not in ranks:
        raise ValueError(f"root_rank={root_rank} is not in {process_set}: expected one of {list(ranks)}.")


def check_reduced(*tensors: torch.Tensor) -> None:
    """Raise ValueError for tensors that cannot be reduced."""
    _check_tensors(tensors, lambda tensor: tensor.dtype in _REDUCED)


def check_adasum(tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    """Raise an error for what Adasum does not support: integers, process sets, and 3, 5, 6, ... ranks."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"op=Adasum of {tensor.dtype}: expected floating-point numbers. Use another op.")
    size = members_of(process_set).size
    if size > 1 and process_set.process_set_id != GLOBAL_SET:
        raise NotImplementedError(f"op=Adasum on {process_set}: expected the set of all ranks. Use another op.")
    if not is_power_of_two(size):
        raise NotImplementedError(f"op=Adasum on {size} ranks: expected 2, 4, 8, 16, ... ranks. Use another op.")


def check_moved(*tensors: torch.Tensor) -> None:
    """Raise ValueError for tensors that cannot be sent."""
    _check_tensors(tensors, lambda tensor: dtype_name(tensor) in DTYPES)


def _check_tensors(tensors: Sequence[torch.Tensor], is_supported: Callable[[torch.Tensor], bool]) -> None:
    for tensor in tensors:
        if not is_supported(tensor):
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")


def split_rows(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return how many rows are sent to each rank."""
    count = len(tensor) if tensor.ndim else 0  # without dimensions it is refused on all ranks together
    if splits is None:
        if count % size:
            raise ValueError(
                f"alltoall of {count} rows without splits: expected a multiple of {size}, the ranks of the set."
            )
        return (count // size,) * size
    if isinstance(splits, torch.Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"splits are {splits.dtype}: expected torch.int32.")
    rows = tuple(int(each) for each in splits)
    if len(rows) != size or min(rows) < 0 or sum(rows) > count:
        raise ValueError(
            f"splits {list(rows)} for {count} rows and {size} ranks: expected {size} numbers of rows, "
            f"0 or more, {count} in all at most."
        )
    return rows


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the short name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")
