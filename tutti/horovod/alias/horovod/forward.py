"""A module whose names are those of other modules."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def forward(module: str, *targets: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The public names of the targets, with the functions `__getattr__` and `__dir__` of a module that offers them.

    A name is looked up when it is used, in the first target that has it, so that what changes there shows here.
    """
    sources = [import_module(target) for target in targets]
    found = {name: value for source in sources for name, value in vars(source).items() if not name.startswith("_")}
    names = sorted(name for name, value in found.items() if not isinstance(value, ModuleType))

    def get(name: str) -> Any:
        if not name.startswith("__"):
            for source in sources:
                if hasattr(source, name):
                    return getattr(source, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return names, get, lambda: names
