"""The Python environment of an interpreter, as layers: folders that are packed apart, so that a change repacks one."""

import json
import os
import re
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tutti.errors import LaunchError

PREFIX, BASE = "prefix", "base"  # the names of layers; those of other folders of sys.path are path-0, path-1, ...
CACHED = "__pycache__"
_SYSTEM = Path("/usr")  # what every node has installed
_SITES = ("site-packages", "dist-packages")
_ENDINGS = (".py", ".so", ".pth", ".egg", ".zip")
# Folders of a prefix that ranks do not import from, relative to it.
_UNUSED = ("include", "man", "share/man", "share/doc", "pkgs", "envs", "conda-meta")
_USED_OF_VIRTUAL = ("lib", "lib64", "share", "etc")
_UNUSED_LIBRARY = ("test", "idlelib", "turtledemo", "ensurepip")
_UNUSED_ENDINGS = (".a", ".opt-1.pyc", ".opt-2.pyc")
# A fresh interpreter answers, so that nothing counts that this process has done to its own path.
_QUESTION = """
import json, site, sys, sysconfig
mappings = [getattr(sys.modules.get(getattr(each, "__module__", "")), "MAPPING", {}) for each in sys.meta_path]
print(json.dumps({
    "prefix": sys.prefix,
    "base": sys.base_prefix,
    "python": getattr(sys, "_base_executable", sys.executable),
    "stdlib": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
    "purelib": sysconfig.get_path("purelib"),
    "sites": site.getsitepackages(),
    "library": [sysconfig.get_config_var(name) for name in ("Py_ENABLE_SHARED", "LIBDIR", "INSTSONAME")],
    "path": [each for each in sys.path if each],
    "editable": {name: place for each in mappings for name, place in each.items()},
}))
"""


@dataclass(frozen=True)
class EnvironmentLayer:
    """A folder that becomes the folder `name` of the copy."""

    name: str
    source: Path
    without: frozenset[str] = frozenset()  # relative paths that are left out
    only: frozenset[str] | None = None  # names at the top; None: all


@dataclass(frozen=True)
class Environment:
    """What an interpreter imports from."""

    layers: tuple[EnvironmentLayer, ...]
    python: str  # that a copy starts: relative to the copy, or absolute where every node has it
    library: str | None  # the shared library of Python, relative to the copy, where the interpreter loads one
    is_virtual: bool  # the copy needs a pyvenv.cfg
    system_sites: bool  # and sees the packages of its base
    site_packages: str  # of the copy, relative to the layer `prefix`
    before: tuple[str, ...] = ()  # folders of sys.path before site-packages, relative to the copy
    after: tuple[str, ...] = ()  # and behind it
    shared: dict[str, str] = field(default_factory=dict)  # folders of the copy by the path of their source


def find_environment(python: str) -> Environment:
    """Ask an interpreter for its environment; its variables are those of this process."""
    words = [python, "-P", "-c", _QUESTION]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
        return describe(json.loads(answer.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise LaunchError(
            f"{python} does not say what it imports from ({said[-1] if said else 'it printed nothing'}): expected "
            "Python 3.11 or later. Submit without --stage-environment, or from another environment."
        ) from error


def describe(answer: dict[str, Any]) -> Environment:
    """Divide what an interpreter has answered into layers."""
    prefix, base, python = Path(answer["prefix"]), Path(answer["base"]), Path(os.path.realpath(answer["python"]))
    layers: list[EnvironmentLayer] = []
    sites = [str(Path(each)) for each in answer["sites"]]
    if not prefix.is_relative_to(_SYSTEM):
        layers.append(EnvironmentLayer(PREFIX, prefix, _left_out(prefix, sites, bare=prefix != base)))
    if base != prefix and not base.is_relative_to(_SYSTEM):
        layers.append(EnvironmentLayer(BASE, base, _left_out(base, sites, bare=False)))
    is_virtual = prefix != base or prefix.is_relative_to(_SYSTEM)
    purelib = Path(answer["purelib"])
    inside = purelib.relative_to(prefix) if purelib.is_relative_to(prefix) and layers else None
    environment = Environment(
        layers=tuple(layers),
        python=_place_of(python, layers) or str(python),
        library=_shared_library(answer["library"], layers),
        is_virtual=is_virtual,
        system_sites=is_virtual and any(Path(each).is_relative_to(base) for each in sites),
        site_packages=str(inside or Path("lib") / Path(answer["stdlib"][0]).name / "site-packages"),
    )
    return _add_path(environment, answer, sites)


def _shared_library(known: Sequence[Any], layers: Sequence[EnvironmentLayer]) -> str | None:
    """The library of an interpreter that was built to share it, whose path it would look up in the original prefix."""
    shared, folder, name = known
    path = Path(str(folder)) / str(name)
    return _place_of(path, layers) if shared and path.is_file() else None


def _add_path(environment: Environment, answer: dict[str, Any], sites: Sequence[str]) -> Environment:
    """Add the folders of sys.path that are neither the standard library nor the packages of the prefix."""
    layers, before, after = list(environment.layers), list[str](), list[str]()
    shared: dict[str, str] = {}
    standard = {*answer["stdlib"], *sites}
    behind = False
    for entry in dict.fromkeys(answer["path"]):
        place = Path(entry)
        if entry in sites:
            behind = True
        if entry in standard or not place.exists() or _is_standard(place, answer["stdlib"]):
            continue
        if (name := _place_of(place, layers)) is None:
            if place.is_relative_to(_SYSTEM):
                continue  # on every node, and found again by itself
            name = f"path-{len(shared)}"
            layers.append(_layer_of_path(name, place))
            name = f"{name}/{place.name}" if place.is_file() else name
        shared[entry] = name
        (after if behind else before).append(name)
    for module, entry in answer["editable"].items():  # packages that an import hook finds
        place, name = Path(entry), f"path-{len(shared)}"
        if place.is_dir():
            layers.append(EnvironmentLayer(f"{name}/{module.replace('.', '/')}", place))
        elif place.is_file():
            layers.append(EnvironmentLayer(name, place.parent, only=frozenset((place.name,))))
        shared[entry] = name
        after.append(name)
    return replace(environment, layers=tuple(layers), before=tuple(before), after=tuple(after), shared=shared)


def _left_out(prefix: Path, sites: Sequence[str], bare: bool) -> frozenset[str]:
    """What a prefix has that is never imported; of a virtual environment all but its packages and their data."""
    found = set(_UNUSED)
    if bare:  # it may have been made in a folder of a project
        found |= {each.name for each in prefix.iterdir() if each.name not in _USED_OF_VIRTUAL}
    for stdlib in (*prefix.glob("lib/python3.*"), *prefix.glob("lib64/python3.*")):
        found |= {str((stdlib / name).relative_to(prefix)) for name in _UNUSED_LIBRARY}
        found |= {str(each.relative_to(prefix)) for each in stdlib.glob("config-*")}  # the static library
        own = [stdlib / name for name in _SITES]
        found |= {str(each.relative_to(prefix)) for each in own if str(each) not in sites}
    return frozenset(found)


def _layer_of_path(name: str, place: Path) -> EnvironmentLayer:
    """All of a folder of packages; of a folder of sources only what can be imported."""
    if place.is_file():
        return EnvironmentLayer(name, place.parent, only=frozenset((place.name,)))
    if place.name in _SITES:
        return EnvironmentLayer(name, place)
    return EnvironmentLayer(name, place, only=frozenset(each.name for each in place.iterdir() if _is_importable(each)))


def _is_importable(path: Path) -> bool:
    if path.name.startswith(".") or path.name == CACHED:
        return False
    if path.is_file():
        return path.suffix in _ENDINGS
    if (path / "pyvenv.cfg").exists():
        return False
    try:
        return any(each.suffix in (".py", ".so") or (each / "__init__.py").exists() for each in path.iterdir())
    except OSError:
        return False


def _is_standard(place: Path, stdlib: Sequence[str]) -> bool:
    """Whether a path is the zip of the standard library, or its folder of extension modules."""
    return re.fullmatch(r"python3\d+\.zip", place.name) is not None or (
        place.name == "lib-dynload" and str(place.parent) in stdlib
    )


def _place_of(path: Path, layers: Sequence[EnvironmentLayer]) -> str | None:
    """A path in the copy, if one of the layers contains it."""
    for layer in layers:
        if path.is_relative_to(layer.source) and layer.only is None:
            relative = path.relative_to(layer.source)
            if not any(relative.is_relative_to(left_out) for left_out in layer.without):
                return str(Path(layer.name) / relative)
    return None


@dataclass(frozen=True)
class File:
    """A file or a link of a layer."""

    name: str  # relative to the layer
    path: str
    bytes: int
    modified: int  # nanoseconds since 1970
    link: str | None = None  # the target of a link within the layer


def files_of(layer: EnvironmentLayer) -> Iterator[File]:
    """The files of a layer, in the order of their names; links that lead out of it are followed."""
    root = os.path.realpath(layer.source)
    yield from _files_below(layer, root, "", (root,))


def _files_below(layer: EnvironmentLayer, folder: str, inside: str, above: tuple[str, ...]) -> Iterator[File]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{inside}{entry.name}"
        if (
            name in layer.without
            or name.endswith(_UNUSED_ENDINGS)
            or (not inside and layer.only is not None and entry.name not in layer.only)
        ):
            continue
        real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
        if entry.is_symlink() and os.path.commonpath([real, above[0]]) == above[0]:
            if os.path.exists(real):
                target = os.path.relpath(real, above[0])
                yield File(name, entry.path, 0, 0, os.path.relpath(target, os.path.dirname(name) or "."))
        elif entry.is_dir():
            if os.path.realpath(real) not in above:
                yield from _files_below(layer, real, f"{name}/", (*above, os.path.realpath(real)))
        elif entry.is_file() and stat.S_ISREG((facts := os.stat(real)).st_mode):
            yield File(name, real, facts.st_size, facts.st_mtime_ns)
