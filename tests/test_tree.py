"""The tree itself: small folders, short modules, one class for a name, and no import cycle."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import REPOSITORY

PACKAGE = REPOSITORY / "tutti"
MOST_MODULES = 359
MOST_IN_A_FOLDER = 20
MOST_LINES = 400
LONGER: dict[str, str] = {  # modules above MOST_LINES, with the reason
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        words = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a module imports, also inside functions."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def find_cycle() -> list[str]:
    """A chain of modules of which each imports the next, the last being the first again; empty if there is none."""
    graph = {
        name: sorted({other for other in imported(path) if other in modules()}) for name, path in modules().items()
    }
    done: set[str] = set()

    def follow(name: str, chain: list[str]) -> list[str]:
        if name in chain:
            return [*chain[chain.index(name) :], name]
        if name not in done:
            for other in graph[name]:
                if other != name and (cycle := follow(other, [*chain, name])):
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in graph if (cycle := follow(name, []))), [])


def test_there_are_few_modules() -> None:
    assert len(modules()) <= MOST_MODULES


def test_a_folder_is_read_at_a_glance() -> None:
    sizes = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > MOST_IN_A_FOLDER} == {}


def test_siblings_with_a_common_prefix_are_a_package() -> None:
    prefixes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in modules().values():
        if "_" in path.stem.strip("_"):
            prefixes[str(path.parent), path.stem.split("_")[0]].append(path.stem)
    assert {key: names for key, names in prefixes.items() if len(names) > 2} == {}


def test_modules_are_short_or_say_why_not() -> None:
    lengths = {name: path.read_text().count("\n") for name, path in modules().items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES and name not in LONGER} == {}
    assert [name for name in LONGER if lengths.get(name, 0) <= MOST_LINES] == []


def test_a_class_name_occurs_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_module_imports_itself_through_others() -> None:
    assert find_cycle() == []


@pytest.mark.parametrize("way_around", ["sys.modules.get(", "sys.modules["])
def test_layers_have_no_way_around_them(way_around: str) -> None:
    found = [f"{name}: {line.strip()}" for name, path in modules().items() for line in path.read_text().split("\n")]
    assert [line for line in found if way_around in line and '"tutti' in line] == []
