"""How ranks start: on this machine by torchrun's agent, or by a launcher that is already there.

`tutti.launch(function, ranks=2)` calls a function on ranks: the package itself can be called, since its name is that of
the function.
"""

import sys
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> list[Any]:
        from tutti.launch.function import launch

        return launch(*arguments, **options)


sys.modules[__name__].__class__ = _Launch
