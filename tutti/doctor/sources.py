"""Digests of code and data: equal on ranks that have the same, and cheap to make."""

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.config.run import RunConfig
from tutti.ranks.fingerprint import DIGITS, MISSING, MOST_FILES, digest_of_files, digest_of_package

_SAMPLE_BYTES = 1 << 16
_PATH_OPTIONS = ("path", "root", "folder", "file", "files", "train", "valid", "data")


def user_code(config: RunConfig) -> dict[str, str]:
    """A digest for each module or package whose objects the recipe names; nothing of it is imported."""
    parts = (config.data.name, config.model.name, config.loss.name, config.optim.name, *config.metrics)
    modules = sorted({name.partition(":")[0].partition(".")[0] for name in parts if ":" in name} - {"tutti"})
    return {module: digest_of_module(module) for module in modules}


def digest_of_module(name: str) -> str:
    """A digest of a module's file, or of all the files of a package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return MISSING
    if spec.submodule_search_locations:
        return digest_of_package(Path(next(iter(spec.submodule_search_locations))))
    if not spec.has_location or not spec.origin:
        return "built in"
    return digest_of_files([spec.origin], os.path.dirname(spec.origin))


def data_paths(config: RunConfig) -> list[str]:
    """The files and folders that the recipe's data is read from."""
    options: dict[str, Any] = config.data.options()
    if config.data.name == "nbody":
        return [] if options["make"] or options["source"] == "synthetic" else [options["train"], options["valid"]]
    given = [(key, value) for key, value in options.items() if isinstance(value, str)]
    return [value for key, value in given if (key in _PATH_OPTIONS or os.sep in value) and key != "cache"]


def state_of(path: str) -> dict[str, Any]:
    """What is at a path: of a file its size and a digest of both ends, of a folder the names two floors deep."""
    place = Path(path)
    try:
        if place.is_file():
            return {"kind": "file", "bytes": place.stat().st_size, "digest": _ends(place)}
        if place.is_dir():
            return _state_of_folder(place)
    except OSError as error:
        return {"kind": "unreadable", "why": error.strerror or str(error)}
    return {"kind": MISSING}


def _state_of_folder(folder: Path) -> dict[str, Any]:
    files, digest, total = 0, hashlib.blake2b(), 0
    for entry in _entries(folder, floors=2):
        files += 1
        digest.update(os.path.relpath(entry.path, folder).encode())
        if files <= MOST_FILES and entry.is_file():
            total += entry.stat().st_size
            digest.update(str(entry.stat().st_size).encode())
    return {"kind": "folder", "entries": files, "bytes": total, "digest": digest.hexdigest()[:DIGITS]}


def _entries(folder: Path | str, floors: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        inside = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in inside:
        yield entry
        if floors > 1 and entry.is_dir():
            yield from _entries(entry.path, floors - 1)


def _ends(path: Path) -> str:
    """A digest of a file's first and last bytes."""
    with open(path, "rb") as file:
        digest = hashlib.blake2b(file.read(_SAMPLE_BYTES))
        file.seek(max(0, path.stat().st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]
