"""tutti: one recipe trains on any number of ranks, and resumes exactly."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "fit", "launch", "load", "open_run", "start", "summary"]

if TYPE_CHECKING:
    from tutti.after.run import open_run
    from tutti.config.load import load
    from tutti.launch.function import launch
    from tutti.runs import summary
    from tutti.train.own import start
    from tutti.train.torch import fit

_MODULES = {
    "fit": "tutti.train.torch",
    "load": "tutti.config.load",
    "open_run": "tutti.after.run",
    "start": "tutti.train.own",
}


def __getattr__(name: str) -> Any:
    """Import what is public on first use, so that importing tutti stays light."""
    if name == "launch":
        return importlib.import_module("tutti.launch")  # the package, which can be called
    if name == "summary":
        return importlib.import_module("tutti.runs.summary")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'tutti' has no attribute {name!r}")
