"""Horovod's package by its own name: every name in it is tutti's."""

from typing import TYPE_CHECKING, Any

from tutti.launch.horovodrun_options import HOROVOD_VERSION as __version__

if TYPE_CHECKING:
    from tutti.launch.call import run

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    """`horovod.run`, imported on first use."""
    if name == "run":
        from tutti.launch.call import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
