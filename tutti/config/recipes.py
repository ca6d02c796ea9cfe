"""Where recipes are: the built-in ones by name, a user's own by path; reading them as YAML."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tutti.errors import ConfigError, nearest

DEFAULT_RUN = "base"
_PACKAGE = Path(__file__).parent.parent
BUILT_IN = next((p for p in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes") if p.is_dir()), _PACKAGE / "recipes")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class _Loader(yaml.SafeLoader):
    """YAML with the floats that people write: 3e-4 is a number, as in YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*([eE][-+]?\d+)|\.\d+([eE][-+]?\d+)?|\d+\.\d*)$"),
        list("-+0123456789."),
    )


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, or an error that names the place."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', error)}.") from error


def dump_yaml(values: Any) -> str:
    """Plain values as YAML that `parse_yaml` reads back as they were."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


def read_runs(path: Path, known: set[str]) -> dict[str, dict[str, Any]]:
    """The named runs of a recipe file; a file with the keys of a run at its top holds one run, `base`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: cannot be read: {error}.") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"recipe {path}: expected a mapping of runs or of a run's keys, found {content!r:.60}.")
    content = {str(name): value for name, value in content.items()}
    if (known | {"extends"}) & content.keys():
        return {DEFAULT_RUN: content}
    for name, run in content.items():
        if not isinstance(run, dict):
            raise ConfigError(f"recipe {path}: run {name!r} is {run!r:.60}: expected a mapping of keys.")
    return content


def find(recipe: str) -> tuple[Path, str]:
    """The file and the run in it that a recipe's name means: `mnist`, `mnist/large_batch`, `my.yaml`, `my.yaml/run`."""
    for path, run in ((recipe, DEFAULT_RUN), recipe.rpartition("/")[::2]):
        if path.endswith((".yaml", ".yml")) and Path(path).is_file():
            return Path(path), run
    if ".yaml" in recipe or ".yml" in recipe:
        raise ConfigError(f"recipe {recipe!r}: no such file in {Path.cwd()}. Give the path of a YAML file.")
    name, _, run = recipe.partition("/")
    path = BUILT_IN / f"{name}.yaml"
    if not re.fullmatch(r"[\w.-]+", name) or not path.is_file():
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
    """Replace `${NAME}` and `${NAME:-default}` from the environment."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        found = os.environ.get(name, default)
        if found is None:
            raise ConfigError(
                f"{where}: {text!r} uses ${{{name}}}, which is not set. Set it (export {name}=...), "
                f"or write ${{{name}:-default}}."
            )
        return found

    return _VARIABLE.sub(value, text)
