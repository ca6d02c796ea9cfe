"""Horovod's package by its own name: every name in it is tutti's."""

from typing import TYPE_CHECKING, Any

from tutti.horovod.run.arguments import HOROVOD_VERSION as __version__

if TYPE_CHECKING:
    from tutti.horovod.run.call import run

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    """`horovod.run`, imported on first use."""
    if name == "run":
        from tutti.horovod.run.call import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
