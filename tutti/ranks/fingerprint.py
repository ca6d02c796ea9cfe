"""Fingerprints of the versions and the code of ranks; those that differ from most are named."""

import hashlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tutti import units
from tutti.errors import LaunchError
from tutti.ranks.group import Group

MISSING = "missing"
OWN_FOLDER = Path(__file__).parent.parent
PACKAGES = ("torch", "numpy", "tutti")
DIGITS = 12  # of a digest
MOST_FILES = 2000
_CODE = "code"


def check_same_code(group: Group) -> None:
    """Refuse hosts with other versions of packages or of this code; every rank enters."""
    if len(set(group.hosts)) == 1:
        return
    found = disagreements(group.gather(fingerprint()), group.hosts)
    if found:
        error = LaunchError("\n".join(["hosts do not have the same code:", *(f"  {line}" for line in found)]))
        error.agreed = True
        raise error


def fingerprint() -> dict[str, str]:
    """The versions of a rank and a digest of tutti's code, in a few milliseconds."""
    versions = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **versions, _CODE: own_code()}


def disagreements(fingerprints: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """One line for each group of ranks with other versions or code than most; both lists are in the order of ranks."""
    return compare_versions(list(enumerate(hosts)), fingerprints)


def compare_versions(ranks: Sequence[tuple[int, str]], fingerprints: Sequence[Mapping[str, str]]) -> list[str]:
    """The same for ranks given as number and host."""
    lines = []
    for key in dict.fromkeys(key for each in fingerprints for key in each):
        values = [each.get(key, MISSING) for each in fingerprints]
        fix = "Install the same on all hosts, or start from a folder that they share."
        lines += [f"{text}. {fix}" for text in odd_ones(ranks, values, lambda value, key=key: _describe(key, value))]
    return lines


def odd_ones(ranks: Sequence[tuple[int, str]], values: Sequence[Any], name: Callable[[Any], str]) -> Iterator[str]:
    """Ranks, given as number and host, with another value than most; of equally frequent values, the first is right."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    odd: dict[tuple[str, Any], list[int]] = {}
    for (rank, host), value in zip(ranks, values, strict=True):
        if value != usual:
            odd.setdefault((host, value), []).append(rank)
    if counts[usual] == 1:
        most = f"rank {ranks[values.index(usual)][0]} has"
    else:
        most = "all others have" if len(odd) == 1 else f"{counts[usual]} of {len(values)} ranks have"
    for (host, value), numbers in odd.items():
        has = "has" if len(numbers) == 1 else "have"
        yield f"{units.ranks(numbers)} on host {host} {has} {name(value)}, {most} {name(usual)}"


def own_code() -> str:
    """A digest of tutti's source files."""
    return digest_of_package(OWN_FOLDER)


def digest_of_package(folder: Path) -> str:
    """A digest of the names and contents of a folder's Python files."""
    return digest_of_files(_python_files(folder), str(folder))


def digest_of_files(files: Sequence[str], folder: str) -> str:
    """A digest of the names, below a folder, and the contents of files."""
    digest = hashlib.blake2b()
    for path in files:
        digest.update(path.removeprefix(folder).encode())
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:DIGITS]


def _python_files(folder: Path) -> list[str]:
    """At most so many: a package that is a user's whole home folder is not read to its end."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        found += [os.path.join(place, name) for name in sorted(files) if name.endswith(".py")]
        if len(found) >= MOST_FILES:
            break
    return found[:MOST_FILES]


def _version(package: str) -> str:
    if (module := sys.modules.get(package)) is not None:
        return str(module.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def _describe(key: str, value: str) -> str:
    if value == MISSING:
        return f"no {key}"
    return f"tutti's code with digest {value}" if key == _CODE else f"{key} {value}"
