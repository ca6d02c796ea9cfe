"""The JSON schema of recipes: a validator accepts what tutti accepts, and finds what an editor has to mark."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import REPOSITORY, Call

from tutti.config.json_schema import header, recipe_schema
from tutti.config.load import load
from tutti.config.parts import SECTIONS, names_of
from tutti.config.recipes import BUILT_IN, parse_yaml, read_yaml
from tutti.config.run import RunConfig

SHIPPED = [*sorted(BUILT_IN.glob("*.yaml")), REPOSITORY / "examples" / "own_model.yaml"]
RUN = """
data: {name: digits, shift: 1}
model: {name: mlp, hidden: [32]}
optim: {name: adamw, lr: 1e-3}
batch: {global: 64}
epochs: 2
"""


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def errors(validator: Any, recipe: Any) -> list[str]:
    return [error.message for error in validator.iter_errors(recipe)]


def changed(**values: Any) -> dict[str, Any]:
    """The run with other values; None leaves a key out."""
    whole = parse_yaml(RUN, "here") | values
    return {key: value for key, value in whole.items() if value is not None}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_name_the_schema(path: Path, validator: Any) -> None:
    assert errors(validator, read_yaml(path)) == []
    named = path.read_text().splitlines()[0].partition("$schema=")[2]
    assert (path.parent / named).resolve() == (REPOSITORY / "recipes" / "recipe.schema.json").resolve()


def test_the_configuration_of_a_run_is_valid(validator: Any) -> None:
    for recipe in ("digits", "cifar10/muon", "nbody", "text"):
        assert errors(validator, load(recipe).plain()) == [], recipe


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"name": "my_models:Net", "anything": 3}},
        {"data": {"name": "pkg.data:Sky", "workers": 2, "path": "x"}},
        {"optim": {"name": "torch.optim:RMSprop", "lr": 1e-3, "alpha": 0.9}},
        {"metrics": ["accuracy", "mine:error"]},
        {"extends": "digits", "data": {"shift": 2}, "model": None, "optim": {"lr": 0.1}, "batch": None, "epochs": None},
        {"speed": {"compile": "gpu"}, "parallel": {"space": [2, 2], "shard": "all"}},
    ],
    ids=str,
)
def test_what_tutti_accepts_is_valid(values: dict[str, Any], validator: Any) -> None:
    recipe = changed(**values)
    assert errors(validator, recipe) == []
    assert errors(validator, {"base": changed(), "other": recipe}) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochz": 3}, "'epochz' was unexpected"),
        ({"model": {"name": "mlp", "hiden": [3]}}, "'hiden' was unexpected"),
        ({"batch": {"globl": 64}}, "'globl' was unexpected"),
        ({"model": {"name": "mpl"}}, "'mpl' is not valid under any of the given schemas"),
        ({"data": {"name": "digits", "workers": -1}}, "-1 is less than the minimum of 0"),
        ({"optim": {"name": "adamw", "lr": "fast"}}, "'fast' is not of type 'number'"),
        ({"precision": "fp8"}, "'fp8' is not one of ['fp32', 'bf16', 'fp16']"),
        ({"metrics": ["acuracy"]}, "'acuracy' is not valid under any of the given schemas"),
        ({"optim": {"name": "adamw"}}, "'lr' is a required property"),
        ({"model": {"hidden": [3]}}, "'name' is a required property"),
        ({"epochs": None}, "'epochs' is a required property"),
    ],
    ids=str,
)
def test_a_mistake_is_found_in_a_single_run_and_in_a_named_one(
    values: dict[str, Any], message: str, validator: Any
) -> None:
    recipe = changed(**values)
    for found in (errors(validator, recipe), errors(validator, {"base": changed(), "other": recipe})):
        assert len(found) == 1 and message in found[0]


def test_a_wrong_key_is_found_in_a_run_that_extends_another(validator: Any) -> None:
    runs = {"base": changed(), "long": {"extends": "base", "epochs": 9, "schedule": {"decy": "cosine"}}}
    assert errors(validator, runs) == ["Additional properties are not allowed ('decy' was unexpected)"]


def test_editors_can_offer_every_key_and_every_name_with_a_description(validator: Any) -> None:
    schema = validator.schema
    offered = schema["properties"]
    assert set(offered) == {*RunConfig.model_fields, "extends"}
    for section in SECTIONS:
        assert schema["$defs"][section]["properties"]["name"]["examples"] == [*names_of(section), "module:object"]
    micro = schema["$defs"]["BatchConfig"]["properties"]["micro"]
    assert micro["description"].startswith("samples in one forward pass")
    assert "global" in schema["$defs"]["BatchConfig"]["properties"]


def test_the_command_prints_or_writes_the_schema(
    call_tutti: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validator: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call_tutti("schema")
    assert code == 0 and json.loads(out) == validator.schema
    code, out, _ = call_tutti("schema", "--out", "own.json")
    assert code == 0 and header("own.json") in out.splitlines()
    assert json.loads((tmp_path / "own.json").read_text()) == validator.schema


def test_a_file_that_cannot_be_written_is_named(call_tutti: Call, tmp_path: Path) -> None:
    code, out, err = call_tutti("schema", "--out", str(tmp_path / "no" / "own.json"))
    assert code == 2 and out == ""
    assert "own.json: cannot be written: No such file or directory. Give a file in a folder that exists." in err
