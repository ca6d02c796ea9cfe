"""From the name of a recipe and overrides to a frozen configuration, with the source of each value."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pydantic

from tutti.config import parts
from tutti.config.framework import check_framework
from tutti.config.layout import check_parallel
from tutti.config.recipes import BUILT_IN, DEFAULT_RUN, expand, find, parse_yaml, read_runs
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, nearest

Key = tuple[str, ...]
COMMAND_LINE = "command line"
# If a later layer sets one of these, the other is dropped from earlier layers.
_ALTERNATIVES: dict[Key, Key] = {
    ("batch", "global"): ("batch", "per_rank"),
    ("batch", "per_rank"): ("batch", "global"),
    ("schedule", "warmup_steps"): ("schedule", "warmup_epochs"),
    ("schedule", "warmup_epochs"): ("schedule", "warmup_steps"),
}
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text; put it in quotes, as in '\"512\"'",
    "tuple_type": "a list",
    "model_type": "a group of keys",
    "model_attributes_type": "a group of keys",
    "dict_type": "a group of keys",
}


@dataclass
class Layers:
    """Values by key, merged layer by layer, with the source of each."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)

    def add(self, given: Mapping[str, Any], source: str) -> None:
        """Add a layer: new values replace old ones; environment variables in its texts are replaced, once."""
        self.merge(_expanded(given), source)

    def merge(self, given: Mapping[str, Any], source: str) -> None:
        """Add a layer whose texts are final."""
        if isinstance(given.get("step"), str):  # short for its name
            given = {**given, "step": {"name": given["step"]}}
        for place in (*((section,) for section in (*parts.SECTIONS, "step")), *parts.WITHIN):
            new, old = _name_in(given, place), _name_in(self.values, place)
            if None not in (new, old) and new != old:  # options of another part do not apply
                self._drop(place)
        if "stop_at" in given:  # it has exactly one metric
            self._drop(("stop_at",))
        leaves = dict(_leaves(given))
        for key, other in _ALTERNATIVES.items():
            if leaves.get(key) is not None and leaves.get(other) is None:
                self._drop(other)
        for key, value in leaves.items():
            self._set(key, value, source)

    def override(self, overrides: Iterable[str]) -> None:
        """Apply the overrides of a command line, which are one layer, in any order."""
        typed = Layers()
        for text in overrides:
            typed.add(_parse_override(text), COMMAND_LINE)
        self.merge(typed.values, COMMAND_LINE)

    def _set(self, key: Key, value: Any, source: str) -> None:
        self._drop(key)
        target = self.values
        for word in key[:-1]:
            if not isinstance(target.get(word), dict):
                target[word] = {}
            target = target[word]
        target[key[-1]] = value
        self.sources[key] = source

    def _drop(self, key: Key) -> None:
        target: Any = self.values
        for word in key[:-1]:
            target = target.get(word, {}) if isinstance(target, dict) else {}
        if isinstance(target, dict):
            target.pop(key[-1], None)
        self.sources = {k: s for k, s in self.sources.items() if k[: len(key)] != key}


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the source of every value in it."""

    config: RunConfig
    sources: Mapping[Key, str]

    def entries(self) -> Iterator[tuple[Key, Any, str]]:
        """Every key with its value and source."""
        for key, value in _leaves(self.config.plain()):
            sources = (self.sources[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.sources)
            yield key, value, next(sources, "default")


def load(recipe: str, *overrides: str) -> RunConfig:
    """The configuration of a recipe by name or path, with overrides such as `optim.lr=3e-4`."""
    return resolve(recipe, overrides).config


def resolve(recipe: str, overrides: Iterable[str] = ()) -> Resolved:
    """Read a recipe, follow `extends`, apply the overrides, validate."""
    path, run = find(recipe)
    layers = Layers()
    chain = _chain(path, run)
    for layer in chain:
        layers.add(layer.values, layer.source)
    layers.override(overrides)
    if _may_shorten_warmup(layers, chain):
        layers.merge({"schedule": {"shorten_warmup": True}}, "because the length of the run was given")
    if "recipe" not in layers.values:
        name = path.stem if run == DEFAULT_RUN else f"{path.stem}/{run}"
        layers.add({"recipe": name}, "name of the recipe")
    return Resolved(validate(layers.values, layers.sources), layers.sources)


class _RunInFile(NamedTuple):
    """A run as a file has it, without the one that it extends."""

    source: str  # for people
    path: Path
    values: dict[str, Any]


def _may_shorten_warmup(layers: Layers, chain: list[_RunInFile]) -> bool:
    """Returns whether the length of the run is set after the warm-up, by a command line or a recipe in another file."""
    sources, schedule = layers.sources, layers.values.get("schedule")
    if not isinstance(schedule, dict) or not any(schedule.get(key) for key in ("warmup_epochs", "warmup_steps")):
        return False
    asked = [("schedule", key) for key in ("warmup_epochs", "warmup_steps", "shorten_warmup")]
    order = [*(layer.source for layer in chain), COMMAND_LINE]
    files = [*(layer.path for layer in chain), None]
    length, warmup = (
        max((order.index(sources[key]) for key in keys if key in sources), default=0)
        for keys in ([("epochs",), ("max_steps",)], asked)
    )
    return length > warmup and files[length] != files[warmup]


def change(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """A configuration with other values, given as overrides."""
    layers = Layers()
    layers.add(config.plain(), "before")
    layers.override(overrides)
    return validate(layers.values, layers.sources)


def resolve_values(values: Mapping[str, Any], source: str = "fit()") -> RunConfig:
    """A configuration from plain values instead of a recipe's file."""
    layers = Layers()
    layers.add(values, source)
    return validate(layers.values, layers.sources)


def validate(values: Mapping[str, Any], sources: Mapping[Key, str] | None = None) -> RunConfig:
    """Validate plain values; raises ConfigError with a line for each that is wrong."""
    try:
        config = RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        lines = [_explain(dict(item), sources or {}) for item in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None
    _check_valid_sets(config)
    check_framework(config)
    check_parallel(config)
    return config


def _check_valid_sets(config: RunConfig) -> None:
    """Raises ConfigError for a further validation set with options that its dataset does not have."""
    for name in config.valid or ():
        try:
            config.valid_set(name)
        except pydantic.ValidationError as error:
            lines = [_explain(dict(item) | {"loc": ("data", *item["loc"])}, {}) for item in error.errors()]
            named = [line.replace("data.", f"valid.{name}.", 1) for line in dict.fromkeys(lines)]
            raise ConfigError("\n".join(named)) from None


def _chain(path: Path, run: str, seen: tuple[tuple[Path, str], ...] = ()) -> list[_RunInFile]:
    """The layers of a run, those of the run that it extends first."""
    runs = read_runs(path, set(RunConfig.model_fields))
    if run not in runs:
        raise ConfigError(
            f"recipe {path.name}: there is no run {run!r}: expected one of {', '.join(runs)}.{nearest(run, runs)}"
        )
    if (path.resolve(), run) in seen:
        names = " -> ".join(name for _, name in (*seen, (path, run)))
        raise ConfigError(f"recipe {path.name}: `extends` goes in a circle: {names}. Remove one of them.")
    values = dict(runs[run])
    parent = values.pop("extends", None)
    folder = "recipes/" if path.parent == BUILT_IN else ""
    layer = [_RunInFile(f"{folder}{path.name} [{run}]", path, values)]
    if parent is None:
        return layer
    seen = (*seen, (path.resolve(), run))
    if not isinstance(parent, str):
        raise ConfigError(f"recipe {path.name}: extends={parent!r} in run {run!r}: expected the name of a run.")
    if parent in runs:
        return _chain(path, parent, seen) + layer
    try:  # a file of the user's beside this one, else one found from here
        found = find(str(path.parent / parent)) if ".y" in parent else find(parent)
    except ConfigError as error:
        hint = nearest(parent, runs)
        raise ConfigError(f"recipe {path.name}: extends={parent!r} in run {run!r}: {error}{hint}") from None
    return _chain(*found, seen) + layer


def _expanded(values: Mapping[str, Any], prefix: Key = ()) -> dict[str, Any]:
    """The values with environment variables in texts replaced."""
    filled: dict[str, Any] = {}
    for name, value in values.items():
        key = (*prefix, str(name))
        if isinstance(value, dict):
            filled[str(name)] = _expanded(value, key)
        else:
            filled[str(name)] = expand(value, ".".join(key)) if isinstance(value, str) else value
    return filled


def _name_in(values: Mapping[str, Any], place: Key) -> Any:
    part: Any = values
    for word in (*place, "name"):
        part = part.get(word) if isinstance(part, dict) else None
    return part


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(word.isidentifier() for word in key.split(".")):
        raise ConfigError(f"override {text!r}: expected key=value, for example optim.lr=3e-4 or epochs=2.")
    nested: Any = parse_yaml(value, f"override {text!r}")
    for word in reversed(key.split(".")):
        nested = {word: nested}
    return nested


def _leaves(values: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in values.items():
        key = (*prefix, str(name))
        if isinstance(value, dict) and value:
            yield from _leaves(value, key)
        else:
            yield key, value


def _explain(error: dict[str, Any], sources: Mapping[Key, str]) -> str:
    """An error of pydantic as a line with the value, the expectation and the fix."""
    key = _key_of(error["loc"])
    name, given, kind = ".".join(map(str, key)), error["input"], error["type"]
    source = sources.get(tuple(map(str, key)))
    place = f" ({source})" if source else ""
    if kind == "extra_forbidden":
        known = _known_keys(error["loc"])
        close = nearest(str(key[-1]), known)
        return f"unknown key {name!r}{place}: expected one of {', '.join(known)}.{close}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        names = parts.names_of(*key)
        if not isinstance(given, dict):
            return f"{name}={given!r}{place}: expected a group of keys, for example {name}.name={names[0]}."
        chosen = given.get("name")
        source = sources.get((*key, "name"))
        place = f" ({source})" if source else ""
        own = ", or module:object" if key[0] == name else ""
        hint = nearest(str(chosen), names)
        return f"{name}.name={chosen!r}{place}: expected one of {', '.join(names)}{own}.{hint}"
    if (isinstance(key[-1] if key else None, int) and kind == "missing") or kind in ("too_long", "too_short"):
        name = ".".join(str(word) for word in key if not isinstance(word, int))
        return f"{name}={given!r}: expected another number of entries in this list."
    if kind == "missing":
        return f"{name} is missing: set it in the recipe, or on the command line as {name}=..."
    if kind == "literal_error":
        return f"{name}={given!r}{place}: expected {error['ctx']['expected']}.{nearest(str(given), _words(error))}"
    if kind == "value_error":
        return f"{name}{place}: {error['ctx']['error']}"
    noun = "a number " if kind.startswith(("greater_than", "less_than")) else ""
    expected = _EXPECTED.get(kind) or noun + error["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{name}={given!r}{place}: expected {expected}."


def _words(error: dict[str, Any]) -> list[str]:
    return [word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ",").split(",")]


def _key_of(loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """A location without the tags that name the chosen parts: ('model', 'mlp', 'hidden') is model.hidden."""
    if loc and loc[0] in parts.SECTIONS and len(loc) > 1:
        loc = (loc[0], *loc[2:])
        if loc[:2] in parts.WITHIN:
            loc = (*loc[:2], *loc[3:])
    return loc


def _known_keys(loc: tuple[Any, ...]) -> list[str]:
    """The known keys of the group at a location."""
    if len(loc) == 1:
        return list(RunConfig.model_fields)
    if loc[0] in parts.SECTIONS:
        named = parts.parts_of(*_key_of(loc)[:-1])
        model: Any = next(part for part in named if part.model_fields["name"].default == loc[-2])
    else:
        given = RunConfig.model_fields[loc[0]].annotation
        model = next(each for each in (given, *get_args(given)) if hasattr(each, "model_fields"))
    return [field.alias or name for name, field in model.model_fields.items()]
