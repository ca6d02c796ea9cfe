"""Horovod's modules by their own names: a table of what each one provides, and the import finder that makes them."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, distributions
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tutti.horovod import __version__

SITE_FOLDER = Path(__file__).parent / "site"  # on `sys.path`, also of spawned processes, it provides `horovod`
_OURS = "tutti.horovod"
API_VERSION = __version__.partition("+")[0]  # without the provider: scripts convert its parts to integers


@dataclass(frozen=True)
class Alias:
    """What a module of Horovod provides: the names of modules of this package, the first that has one first."""

    sources: tuple[str, ...] = ()
    accepts_keras_2: bool = False  # importing it makes Keras 3 accept the arguments of Keras 2
    main: str = ""  # the function of the source that `python -m` calls


HOROVOD_MODULES: dict[str, Alias] = {
    "horovod": Alias(("run.call",)),
    "horovod._keras": Alias(("keras.optimizer",)),
    "horovod._keras.callbacks": Alias(("keras.callbacks",)),
    "horovod._keras.elastic": Alias(("keras.elastic",)),
    "horovod.common": Alias(),
    "horovod.common.basics": Alias(("basics",)),
    "horovod.common.elastic": Alias(("elastic",)),
    "horovod.common.exceptions": Alias(("errors",)),
    "horovod.common.process_sets": Alias(("basics",)),
    "horovod.common.util": Alias(("helpers", "basics")),
    "horovod.data": Alias(("data",)),
    "horovod.data.data_loader_base": Alias(("data",)),
    "horovod.keras": Alias(("keras",), accepts_keras_2=True),
    "horovod.keras.callbacks": Alias(("keras.callbacks",)),
    "horovod.keras.elastic": Alias(("keras.elastic",)),
    "horovod.runner": Alias(("run.call",)),
    "horovod.runner.common": Alias(),
    "horovod.runner.common.util": Alias(),
    "horovod.runner.common.util.env": Alias(("helpers",)),
    "horovod.runner.launch": Alias(("run.command",), main="run_commandline"),
    "horovod.runner.util": Alias(),
    "horovod.runner.util.threads": Alias(("helpers",)),
    "horovod.tensorflow": Alias(("tensorflow",), accepts_keras_2=True),
    "horovod.tensorflow.compression": Alias(("gradients",)),
    "horovod.tensorflow.elastic": Alias(("tensorflow.elastic",)),
    "horovod.tensorflow.functions": Alias(("tensorflow.training",)),
    "horovod.tensorflow.keras": Alias(("keras.of_tensorflow",), accepts_keras_2=True),
    "horovod.tensorflow.keras.callbacks": Alias(("keras.of_tensorflow.callbacks",)),
    "horovod.tensorflow.keras.elastic": Alias(("keras.elastic",)),
    "horovod.tensorflow.mpi_ops": Alias(("tensorflow.collectives", "tensorflow.bridge", "tensorflow")),
    "horovod.tensorflow.util": Alias(("tensorflow",)),
    "horovod.torch": Alias(("torch",)),
    "horovod.torch.compression": Alias(("gradients",)),
    "horovod.torch.elastic": Alias(("torch.elastic",)),
    "horovod.torch.elastic.sampler": Alias(("torch.elastic",)),
    "horovod.torch.elastic.state": Alias(("torch.elastic",)),
    "horovod.torch.functions": Alias(("torch.functions",)),
    "horovod.torch.mpi_ops": Alias(("torch.ops", "torch.collectives", "torch")),
    "horovod.torch.optimizer": Alias(("torch.optimizer",)),
    "horovod.torch.sync_batch_norm": Alias(("torch.collectives",)),
}


class HorovodModule(ModuleType):
    """A module that looks up its names in its sources when they are used, so that it shows their present values."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return _public_names(self.__name__)
        if name in _submodules(self.__name__):
            return import_module(f"{self.__name__}.{name}")
        if not name.startswith("__") or name == "__version__":
            for source in _sources(self.__name__):
                if hasattr(source, name):
                    return getattr(source, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*_public_names(self.__name__), *_submodules(self.__name__)]


class ProvidedDistribution(Distribution):
    """What `importlib.metadata` tells a program about the distribution horovod; pip does not see it."""

    def read_text(self, filename: str) -> str | None:
        contents = {
            "METADATA": "Metadata-Version: 2.1\nName: horovod\n"
            f"Version: {API_VERSION}\nSummary: The API of Horovod, provided by tutti.\n",
            "INSTALLER": "tutti\n",
            "top_level.txt": "horovod\n",
        }
        return contents.get(filename)

    def locate_file(self, path: Any) -> Path:
        return SITE_FOLDER / path


class HorovodFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of the table, except the package `horovod` itself, and answers for its metadata."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Return the distribution of the package, for `importlib.metadata`."""
        name = getattr(context, "name", None)
        return [ProvidedDistribution()] if name is None or name.lower() == "horovod" else []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "horovod" or fullname not in HOROVOD_MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in HOROVOD_MODULES)
        return ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return HorovodModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import the sources, which tell what has to be installed where a framework is missing."""
        _sources(module.__name__)
        if HOROVOD_MODULES[module.__name__].accepts_keras_2:
            import_module(f"{_OURS}.keras.patches").accept_keras_2()

    def get_code(self, fullname: str) -> CodeType | None:
        """Return what `python -m` executes."""
        alias = HOROVOD_MODULES[fullname]
        if not alias.main:
            return None
        return compile(f"from {_OURS}.{alias.sources[0]} import {alias.main}\n{alias.main}()", fullname, "exec")


def define_package(name: str) -> None:
    """Give a package that is being imported Horovod's names, and make its modules importable."""
    package = sys.modules[name]
    package.__class__ = HorovodModule
    vars(package)["__version__"] = API_VERSION
    install_finder()


def install_finder() -> None:
    """Make Horovod's modules and its metadata available to this process; a second call does nothing."""
    if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodFinder())


def other_horovod() -> str | None:
    """Return the version of a real Horovod that is installed, if any."""
    installed = distributions(name="horovod")
    return next((each.version for each in installed if not isinstance(each, ProvidedDistribution)), None)


@cache
def _sources(name: str) -> tuple[ModuleType, ...]:
    return tuple(import_module(f"{_OURS}.{source}") for source in HOROVOD_MODULES[name].sources)


@cache
def _submodules(name: str) -> tuple[str, ...]:
    """Return the modules that are attributes of a package; frameworks are none of `horovod`: they must be imported."""
    if name == "horovod":
        return ()
    inside = (other.removeprefix(f"{name}.") for other in HOROVOD_MODULES if other.startswith(f"{name}."))
    return tuple(other for other in inside if "." not in other)


def _public_names(name: str) -> list[str]:
    """Return the names for `import *`: what is public in the sources, without modules."""
    found = {key: value for source in _sources(name) for key, value in vars(source).items()}
    public = (key for key, value in found.items() if not (key.startswith("_") or isinstance(value, ModuleType)))
    return sorted(set(public).difference(_submodules(name)))
