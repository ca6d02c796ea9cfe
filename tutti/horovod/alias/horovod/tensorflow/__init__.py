"""`import horovod.tensorflow as hvd`: the names of tutti.horovod.tensorflow."""

from importlib import import_module
from typing import Any

from ..forward import forward
from . import compression, functions, mpi_ops, util  # noqa: F401

import_module("tutti.horovod.keras.old_scripts").accept()  # after the imports above, which name what is missing
_own = ["compression", "functions", "mpi_ops", "util", "elastic", "keras"]
_names, _get, _ = forward(__name__, "tutti.horovod.tensorflow")
__all__ = [name for name in _names if name not in _own]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Elastic training and Keras' part are imported on first use."""
    return import_module(f"{__name__}.{name}") if name in ("elastic", "keras") else _get(name)


def __dir__() -> list[str]:
    return [*__all__, *_own]
