"""The recipe that `tutti tune` writes: it extends the original, and says what each line has gained.

Light: imports no torch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.bench.ladder import Ladder, Rung
from tutti.config.recipes import DEFAULT_RUN, dump_yaml, find, parse_yaml
from tutti.errors import ConfigError
from tutti.records.files import write_durably

MARK = "# Made by tutti tune"


def check_target(path: Path, recipe: str) -> None:
    """Refuse to write over what is not ours, or where nothing can be written."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--write {path}: expected a name that ends in .yaml.")
    if path.exists() and path.resolve() == find(recipe)[0].resolve():
        raise ConfigError(f"--write {path}: it would extend itself. Choose another name.")
    if path.exists() and not _is_ours(path):
        raise ConfigError(f"--write {path}: a file that tutti tune did not write is there. Choose another name.")
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise ConfigError(f"--write {path}: {path.parent} is not a folder that can be written. Choose another one.")


def write_recipe(path: Path, recipe: str, given: Sequence[str], ladder: Ladder, conditions: Mapping[str, Any]) -> None:
    """Write the tuned recipe so that it loads from where it is."""
    write_durably(path, show_recipe(path.parent, recipe, given, ladder, conditions))


def show_recipe(folder: Path, recipe: str, given: Sequence[str], ladder: Ladder, conditions: Mapping[str, Any]) -> str:
    """The text of the tuned recipe, for a file in a folder."""
    first, last = (figure.median if figure else 0.0 for figure in (ladder.rungs[0].after, ladder.speed))
    speeds = f"{first:,.0f} -> {last:,.0f} samples/s, {ladder.gain:.2f} times as fast"
    lines = [f"{MARK} from {recipe}: {speeds}.", *(f"#   {name}: {value}" for name, value in conditions.items())]
    notes: dict[str, str] = {text.partition("=")[0]: "given on the command line" for text in given}
    for rung in ladder.rungs[1:]:
        if rung.kept:
            notes |= {text.partition("=")[0]: _gained(rung) for text in rung.overrides}
    kept = [f"{key}={value}" for key, value in ladder.kept.items()]
    if not kept:
        lines.append("# Nothing that was tried helped beyond the noise.")
    values = _nested([*given, *kept])
    return "\n".join([*lines, "", _leaf("extends", extends(recipe, folder)), *_show(values, notes)]) + "\n"


def extends(recipe: str, folder: Path) -> str:
    """What a file in a folder says to extend a recipe: a name, or a path that starts there."""
    path, run = find(recipe)
    if ".yaml" not in recipe and ".yml" not in recipe:
        return recipe
    start = os.path.relpath(path.resolve(), folder.resolve())
    return start if run == DEFAULT_RUN else f"{start}/{run}"


def _gained(rung: Rung) -> str:
    speeds = f"{rung.before.median:,.0f} -> {rung.after.median:,.0f} samples/s" if rung.before and rung.after else ""
    return f"{rung.gain or 1:.2f} times as fast ({speeds}): {rung.why}"


def _nested(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as a recipe has them; the later one counts."""
    values: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        *sections, last = key.split(".")
        place = values
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = parse_yaml(value, f"override {text!r}")
    return values


def _show(values: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Lines of YAML, each key with its note above it."""
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        if prefix + key in notes:
            yield f"{indent}# {notes[prefix + key]}"
            yield from (indent + line for line in _leaf(key, value).splitlines())
        else:
            yield f"{indent}{key}:"
            yield from _show(value, notes, f"{prefix}{key}.")


def _leaf(key: str, value: Any) -> str:
    if isinstance(value, dict | list):
        return dump_yaml({key: value})
    return f"{key}: {dump_yaml([value]).strip()[1:-1]}"


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text().startswith(MARK)
    except (OSError, UnicodeDecodeError):
        return False
