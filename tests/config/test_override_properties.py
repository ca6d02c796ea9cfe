"""Properties of overrides and recipes: values come back as they were written, and bad text is refused by name."""

import contextlib
import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tutti.config.load import load, resolve, resolve_values
from tutti.config.recipes import dump_yaml, parse_yaml
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, TuttiError

RECIPE = """\
data: {name: synthetic, shape: [3], classes: 2, train: 64, valid: 8}
model: {name: mlp, hidden: [4, 4]}
optim: {name: adam, lr: 0.1}
batch: {global: 8}
epochs: 2
"""

COUNTS = st.integers(1, 9) | st.integers(1, 2**80)
NON_NEGATIVE = st.floats(0, allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
FRACTIONS = st.floats(0, 1, exclude_max=True)
# `${` begins a variable, which is filled in; a lone surrogate is no character.
ODD_TEXT = st.sampled_from(
    [
        *("null", "~", "yes", "off", "3", "0x1f", "1e5", ".5", "1_000", "12:30", "2026-11-15", "", " ", "a: b", "- a"),
        *("[a", "{a", "'", '"', "\\", "&a", "*a", "!x", "%x", "@", "`", "|", ">", "?", "=", "<<", "a #b", "#c", "a=b"),
        *("\x00", "\x7f", "\x85", "\u2028", "\ufeff", "é", "日本", "\U0001f600", "---", "...", "$HOME", "a\n b\n\n"),
        *("\t", "x " * 80),
    ]
)
TEXT = (ODD_TEXT | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)).filter(lambda text: "${" not in text)
NOT_EMPTY = TEXT.filter(bool)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "epochs": COUNTS,
    "max_steps": st.none() | COUNTS,
    "seed": st.integers(0, 2**63 - 1),
    "out": NOT_EMPTY,
    "recipe": TEXT,
    "checkpoint.best": st.none() | TEXT,
    "optim.lr": POSITIVE,
    "optim.betas": st.lists(FRACTIONS, min_size=2, max_size=2),
    "optim.clip_norm": st.none() | POSITIVE,
    "optim.weight_decay": NON_NEGATIVE,
    "data.shape": st.lists(COUNTS, max_size=6),
    "data.noise": NON_NEGATIVE,
    "model.hidden": st.lists(COUNTS, max_size=6),
    "model.dropout": FRACTIONS,
    "model.batch_norm": st.booleans(),
    "speed.compile": st.sampled_from([True, False, "gpu"]),
    "stop_at": st.none() | st.dictionaries(TEXT, NUMBERS, min_size=1, max_size=1),
    "batch.micro": st.none() | COUNTS,
    "runtime.timeout_seconds": POSITIVE,
    "log.ledger": st.booleans(),
    "ddp.bucket_mb": st.none() | POSITIVE,
}
# Options of a user's own part may be any value that YAML has.
_SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT
_DAYS = st.dates(datetime.date(1000, 1, 1)) | st.datetimes(datetime.datetime(1000, 1, 1))
OPTIONS = st.recursive(
    _SCALARS | _DAYS | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXT, inner, max_size=3)
        | st.lists(st.dictionaries(st.integers() | st.booleans(), inner, max_size=2), max_size=2)
    ),
    max_leaves=8,
)
ANY_TEXT = st.text(max_size=30) | st.text("[]{}:,-!&*|>'\"%@`?#=~<\n\t 0123456789abextrulno._+${}", max_size=30)
# What PyYAML's constructors and Python's recursion limit do not survive.
HARD = (
    "!!int ''",
    "!!float ''",
    "!!bool x",
    "!!timestamp x",
    "!!binary é",
    "[" * 500,
    "{a: " * 500,
    "&a [*a]",
    "&a {x: *a}",
    "{<<: [1]}",
    "0x" + "F" * 5000,
    "9" * 5000,
    "2026-13-45",
    "0001-01-01T00:00:00+23:59",
    '"\\ud800"',
    "!!set {a}",
    "!!python/object:os.system x",
)

repeatable = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and room for one that an example writes."""
    made = tmp_path_factory.mktemp("recipes")
    (made / "my.yaml").write_text(RECIPE)
    return made


def written(folder: Path, text: str) -> str:
    path = folder / "made.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    return str(path)


def value_of(config: RunConfig, key: str) -> Any:
    found: Any = config.plain()
    for name in key.split("."):
        found = found[name]
    return found


@settings(repeatable, max_examples=150)
@given(st.data())
def test_a_value_that_is_written_as_an_override_comes_back(folder: Path, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(list(FIELDS)))
    value = data.draw(FIELDS[key])
    found = value_of(load(str(folder / "my.yaml"), f"{key}={dump_yaml(value)}"), key)
    assert found == value and type(found) is type(value)


@repeatable
@given(OPTIONS)
def test_any_value_that_is_written_as_yaml_is_read_back(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "here") == value


@repeatable
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_a_configuration_that_is_written_as_a_recipe_is_read_back(folder: Path, values: dict[str, Any]) -> None:
    config = load(str(folder / "my.yaml"), *(f"{key}={dump_yaml(value)}" for key, value in values.items()))
    assert load(written(folder, config.as_yaml())) == config


@repeatable
@given(st.dictionaries(st.sampled_from(["depth", "title", "since"]), OPTIONS, max_size=3))
@example({"since": datetime.date(2026, 11, 15)})
@example({"depth": float("inf")})
def test_the_options_of_a_users_part_are_written_and_read_back(folder: Path, options: dict[str, Any]) -> None:
    given_options = (f"model.{key}={dump_yaml(value)}" for key, value in options.items())
    config = load(str(folder / "my.yaml"), "model.name=my.module:Net", *given_options)
    assert load(written(folder, config.as_yaml())) == config


def test_an_option_of_a_type_that_yaml_has_not_is_written_as_text() -> None:
    values = parse_yaml(RECIPE, "here") | {"model": {"name": "my.module:Net", "where": Path("here"), "sizes": (1, 2)}}
    written_values = parse_yaml(resolve_values(values).as_yaml(), "here")
    assert written_values["model"] == {"name": "my.module:Net", "where": "here", "sizes": [1, 2]}


@settings(repeatable, max_examples=30)
@given(st.fixed_dictionaries({}, optional=FIELDS), st.data())
def test_the_order_of_overrides_of_different_keys_does_not_matter(
    folder: Path, values: dict[str, Any], data: st.DataObject
) -> None:
    overrides = [f"{key}={dump_yaml(value)}" for key, value in values.items()]
    others = data.draw(st.permutations(overrides))
    assert load(str(folder / "my.yaml"), *overrides) == load(str(folder / "my.yaml"), *others)


@settings(repeatable, max_examples=120)
@given(st.sampled_from(["", *FIELDS, "model", "stop_at.x", "model.name", "no.such"]), ANY_TEXT)
def test_any_text_as_an_override_is_a_value_or_refused_by_name(folder: Path, key: str, text: str) -> None:
    override = f"{key}={text}" if key else text
    found = None
    with contextlib.suppress(TuttiError):
        found = resolve(str(folder / "my.yaml"), [override])
    if found:
        assert list(found.entries())
        assert load(written(folder, found.config.as_yaml())) == found.config


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("key", ["optim.lr", "stop_at", "model.option"])
def test_hard_yaml_is_a_value_or_refused_by_name(folder: Path, key: str, text: str) -> None:
    name = ["model.name=my.module:Net"] if key == "model.option" else []
    config = None
    with contextlib.suppress(ConfigError):
        config = load(str(folder / "my.yaml"), *name, f"{key}={text}")
    assert config is None or load(written(folder, config.as_yaml())) == config


@repeatable
@given(ANY_TEXT)
@example("base: &a {data: *a}")
@example("extends: " + "a" * 5000 + ".yaml")
@example('extends: "\\0.yaml"')
def test_any_text_as_a_recipe_file_is_refused_by_name(folder: Path, text: str) -> None:
    with pytest.raises(TuttiError):
        load(written(folder, text))


@repeatable
@given(ANY_TEXT)
@example("a" * 5000)
@example("a" * 5000 + ".yaml")
@example("\0.yaml")
def test_any_text_as_the_name_of_a_recipe_is_a_recipe_or_refused_by_name(text: str) -> None:
    with contextlib.suppress(TuttiError):
        assert load(text).recipe == text
