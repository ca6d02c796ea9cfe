"""tutti: one recipe trains on any number of ranks, and resumes exactly."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "fit", "load", "start"]

if TYPE_CHECKING:
    from tutti.config.load import load
    from tutti.train.own import start
    from tutti.train.torch import fit


def __getattr__(name: str) -> Any:
    """Import `load`, `fit` and `start` on first use, so that importing tutti stays light."""
    if name == "load":
        from tutti.config.load import load

        return load
    if name == "fit":
        from tutti.train.torch import fit

        return fit
    if name == "start":
        from tutti.train.own import start

        return start
    raise AttributeError(f"module 'tutti' has no attribute {name!r}")
