"""`import horovod.torch as hvd`: the names of tutti.horovod.torch."""

from importlib import import_module
from typing import Any

from ..forward import forward
from . import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401

_own = ["compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm", "elastic"]
_names, _get, _ = forward(__name__, "tutti.horovod.torch")
__all__ = [name for name in _names if name not in _own]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Elastic training is imported on first use."""
    return import_module(f"{__name__}.elastic") if name == "elastic" else _get(name)


def __dir__() -> list[str]:
    return [*__all__, *_own]
