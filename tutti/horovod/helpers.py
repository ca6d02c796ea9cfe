"""Helper functions of `horovod.common.util`, `horovod.runner.util.threads` and `horovod.runner.common.util.env`."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

_RANK_AND_SIZE_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)
Item = TypeVar("Item")
_cache = cache  # some programs for Horovod use it


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework, such as torch, is supported and installed."""
    return find_spec(f"tutti.horovod.{ext_base_name}") is not None and find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raise ImportError where the framework of a module, such as horovod.torch, is not available."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"Extension {ext_name} has not been built: tutti does not have it here.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def _built(name: str) -> Callable[..., Any]:
    """Return the function of this name for `horovod.common.util`, which takes `verbose`."""

    def built(verbose: bool = False) -> Any:
        found = getattr(import_module("tutti.horovod.basics"), name)()
        if verbose:
            print(f"{name}: {found}")
        return found

    built.__name__ = built.__qualname__ = name
    built.__doc__ = f"Return what `hvd.{name}()` returns; with `verbose`, print it too."
    return built


mpi_built, gloo_built, nccl_built = _built("mpi_built"), _built("gloo_built"), _built("nccl_built")
ddl_built, ccl_built = _built("ddl_built"), _built("ccl_built")


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables within a context, except those with the value None."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Split a sequence into contiguous parts; the first ones may have one more item, and empty ones are left out."""
    size, longer = divmod(len(items), num_parts)
    starts = [part * size + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(starts) if end > start]


def is_iterable(value: Any) -> bool:
    """Return whether a value can be iterated over."""
    return isinstance(value, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is the target or a later one."""
    from packaging.version import parse

    if not (isinstance(ver, str) and isinstance(target, str)):
        raise ValueError(f"versions {ver!r} and {target!r}: expected two strings.")
    return parse(ver) >= parse(target)


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls a function; with `silent`, its exceptions are discarded."""
    if not isinstance(args, tuple | list):
        raise ValueError(f"args={args!r}: expected a tuple of arguments.")

    def call() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank and the world size that a launcher has set in the environment, or 0 and 1."""
    for rank, size in _RANK_AND_SIZE_VARIABLES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1
