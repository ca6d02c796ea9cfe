"""The package horovod, by tutti: its modules lie in tutti.horovod.alias."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

try:
    _other = version("horovod")
except PackageNotFoundError:
    pass
else:
    raise ImportError(
        f"horovod {_other} and tutti-horovod are both installed, and both provide the package horovod: expected one. "
        "To keep tutti's: pip uninstall horovod && pip install --force-reinstall --no-deps tutti-horovod. "
        "To keep Horovod's: pip uninstall tutti-horovod && pip install --force-reinstall --no-deps horovod."
    )

_alias = find_spec("tutti.horovod.alias.horovod")
if _alias is None or _alias.submodule_search_locations is None:
    raise ImportError(
        "tutti-horovod needs a newer tutti, which has tutti.horovod.alias: pip install --upgrade tutti-train"
    )
__path__ = list(_alias.submodule_search_locations)

from tutti.horovod.alias.horovod import __getattr__, __version__  # noqa: E402, F401
