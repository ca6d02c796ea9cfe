"""Small questions that scripts and test suites ask."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

from tutti.horovod.basics import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]
Item = TypeVar("Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework's part can be imported."""
    return find_spec(f"tutti.horovod.{ext_base_name}") is not None and find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raise where a framework's part, such as horovod.torch, is not there."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"Extension {ext_name} has not been built: tutti does not have it here.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a GPU to use."""
    import torch

    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """As many neighbouring parts, the first ones longer by one where they are not equal; empty ones are left out."""
    size, longer = divmod(len(items), num_parts)
    starts = [part * size + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts) if end > start]


def is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is another one or a later one."""
    from packaging.version import parse

    if not (isinstance(ver, str) and isinstance(target, str)):
        raise ValueError(f"versions {ver!r} and {target!r}: expected two strings.")
    return parse(ver) >= parse(target)
