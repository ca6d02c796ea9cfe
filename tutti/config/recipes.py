"""Finds recipes, built-in ones by name and others by path, and reads them as YAML."""

import os
import re
import sys
from collections.abc import Iterator
from os.path import isfile  # Path.is_file raises OSError for a name that is too long
from pathlib import Path
from typing import Any

import yaml

from tutti.errors import ConfigError, nearest

DEFAULT_RUN = "base"
_PACKAGE = Path(__file__).parent.parent
BUILT_IN = next((p for p in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes") if p.is_dir()), _PACKAGE / "recipes")
_MOST_VALUES = 100_000  # in a file, with repetitions by aliases
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number, as in YAML 1.2."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """An integer that Python can also print: only decimal digits are limited."""
        value = super().construct_yaml_int(node)
        str(value)  # a ValueError beyond the limit
        return value


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*([eE][-+]?\d+)|\.\d+([eE][-+]?\d+)?|\d+\.\d*)$"),
        list("-+0123456789."),
    )


def read_yaml(path: Path, what: str = "") -> Any:
    """The value of a YAML file, or an error that names the file; `what` is the option or role of the file."""
    where = f"{what} {path}".strip()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where}: cannot be read: {reason}. Give a YAML file that can be read.") from error
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, or an error that names the place; all YAML files are read by this function."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, where)
        return loader.construct_document(node)
    except RecursionError:
        raise ConfigError(f"{where}: its values are nested too deeply: expected a few levels.") from None
    except ConfigError:
        raise
    except Exception as error:  # besides YAMLError, values that do not fit their tag raise many kinds
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', None) or error}.") from error


def _check_nodes(root: yaml.Node, where: str) -> None:
    """Refuse a repeated key in a mapping, and aliases that expand to very many values or to themselves."""
    waiting, seen = [root], 0
    while waiting:
        node = waiting.pop()
        seen += 1
        if seen > _MOST_VALUES:
            raise ConfigError(
                f"{where}: aliases (*name) make it stand for more than {_MOST_VALUES:,} values, or it holds as many: "
                "expected fewer. Write the values out."
            )
        if isinstance(node, yaml.MappingNode):
            _check_keys(node, where)
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _check_keys(mapping: yaml.MappingNode, where: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ConfigError(
                f"{where}, line {line}: the key {key.value!r} is in line {lines[key.value]} already: expected each key "
                "once in a group. Remove one of them."
            )
        lines[key.value] = line


def dump_yaml(values: Any) -> str:
    """Plain values as YAML that `parse_yaml` reads back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


def read_runs(path: Path, known: set[str]) -> dict[str, dict[str, Any]]:
    """The named runs of a recipe file; a file with the keys of a run at its top level has one run, `base`."""
    content = read_yaml(path, "recipe")
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"recipe {path}: expected a mapping of runs or of a run's keys, found {content!r:.60}.")
    content = {str(name): value for name, value in content.items()}
    if (known | {"extends"}) & content.keys():
        return {DEFAULT_RUN: content}
    for name, run in content.items():
        if not isinstance(run, dict):
            raise ConfigError(f"recipe {path}: run {name!r} is {run!r:.60}: expected a mapping of keys.")
    return content


def _no_run(folder: Path) -> str:
    """What to say of a folder that was given for a recipe and is no run folder."""
    runs = sorted(each.parent for each in folder.glob("*/config.yaml"))
    name = f"{folder.resolve().name}.yaml"  # the recipe of a project, in its folder or beside its package
    recipes = [each for each in (folder / name, folder / ".." / name) if each.is_file()]
    hint = "tutti runs lists those there are."
    if runs:
        hint = f"It holds {len(runs)} of them, the newest is {runs[-1]}."
    elif recipes:
        hint = f"Did you mean the recipe {os.path.normpath(recipes[0])}?"
    return f"{folder} is a folder without config.yaml, and so no run folder: expected the folder of one run. {hint}"


def _is_path(recipe: str) -> bool:
    """Return whether a name can only be meant as a path: it begins with a folder that is there, or that is no name."""
    first, slash, _ = recipe.partition("/")
    return bool(slash) and (first in ("", ".", "..", "~") or os.path.isdir(first))


def find(recipe: str) -> tuple[Path, str]:
    """The file and the run of a recipe's name: `mnist`, `mnist/large_batch`, `my.yaml`, `my.yaml/run`."""
    for path, run in ((recipe, DEFAULT_RUN), recipe.rpartition("/")[::2]):
        if path.endswith((".yaml", ".yml")) and isfile(path):
            return Path(path), run
    if ".yaml" in recipe or ".yml" in recipe:
        raise ConfigError(f"recipe {recipe!r}: no such file in {Path.cwd()}. Give the path of a YAML file.")
    name, _, run = recipe.partition("/")
    path = BUILT_IN / f"{name}.yaml"
    if os.path.isdir(recipe) and not isfile(path):
        raise ConfigError(_no_run(Path(recipe)))
    if not isfile(path) and _is_path(recipe):
        hint = f" Did you mean '{recipe}.yaml'?" if isfile(f"{recipe}.yaml") else ""
        raise ConfigError(
            f"{recipe!r}: there is no such file or folder in {Path.cwd()}. Give a recipe's name, the path of a YAML "
            f"file, or the folder of a run: tutti list and tutti runs print them.{hint}"
        )
    if not re.fullmatch(r"[\w.-]+", name) or not isfile(path):
        names = [found for found, _ in built_in()]
        raise ConfigError(
            f"unknown recipe {recipe!r}: expected one of {', '.join(names)}, or the path of a YAML file."
            f"{nearest(recipe, names)}"
        )
    return path, run or DEFAULT_RUN


def built_in() -> Iterator[tuple[str, str]]:
    """The built-in recipes with the comment line that opens each run."""
    for path in sorted(BUILT_IN.glob("*.yaml")):
        comment = ""
        for line in path.read_text().splitlines():
            if line.startswith("#"):
                comment = line.lstrip("# ")
            elif match := re.match(r"(\w+):", line):
                run = match[1]
                yield (path.stem if run == DEFAULT_RUN else f"{path.stem}/{run}"), comment
                comment = ""


def expand(text: str, where: str) -> str:
    """Replace `${NAME}` and `${NAME:-default}` from the environment; a result that names a variable is refused."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        found = os.environ.get(name, default)
        if found is None:
            raise ConfigError(
                f"{where}: {text!r} uses ${{{name}}}, which is not set. Set it (export {name}=...), "
                f"or write ${{{name}:-default}}."
            )
        return found

    filled = _VARIABLE.sub(value, text)
    if again := _VARIABLE.search(filled):  # it would be replaced when the configuration of the run is read again
        raise ConfigError(
            f"{where}: {text!r} becomes {filled!r}, which uses {again[0]} in turn: expected a value without variables. "
            "Set the variable to its final value."
        )
    return filled


def make_importable(recipe: str, python_path: str = "") -> None:
    """Add this folder, that of the recipe and others to the module search path, also for ranks started here."""
    own = Path(recipe).parent.resolve() if Path(recipe).is_file() else Path.cwd()
    others = [Path(folder) for folder in python_path.split(os.pathsep) if os.path.isdir(folder)]
    for folder in (Path.cwd(), own, *others):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
            known = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = f"{known}{os.pathsep}{folder}" if known else str(folder)
