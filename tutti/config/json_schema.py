"""The JSON schema of recipes, with which editors complete keys and mark errors while a recipe is written."""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from tutti.config.options import PartOptions, StepOptions
from tutti.config.parts import METRICS, SECTIONS, OneOf, names_of
from tutti.config.run import RunConfig
from tutti.config.schema import Section

FILE_NAME = "recipe.schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_OWN_OBJECT = {"pattern": r"^[\w.]+:[\w.]+$"}
_COMMENT = re.compile(r"^    (\w+): .*?[^#]  # (.+)$", re.MULTILINE)

Schema = dict[str, Any]


def header(schema: str = FILE_NAME) -> str:
    """The first line of a recipe, which tells an editor the path of the schema, seen from the recipe."""
    return f"# yaml-language-server: $schema={schema}"


def schema_text() -> str:
    """The JSON schema of recipes as a file's content."""
    return json.dumps(recipe_schema(), indent=1) + "\n"


def recipe_schema() -> Schema:
    """The JSON schema of a recipe's file: the keys of one run, or named runs.

    It knows keys, types, limits and names. What depends on several keys at once, `tutti show` checks.
    """
    kinds = {kind for section in SECTIONS.values() for kind in (*section.built_in, section.user)}
    models = [RunConfig, *sorted(kinds, key=lambda kind: kind.__name__)]
    _, whole = models_json_schema([(model, "validation") for model in models], by_alias=True)
    definitions: dict[str, Schema] = whole["$defs"]
    _describe(definitions)
    for kind in kinds:
        _complete_name(definitions[kind.__name__], kind)
    required = {name: _take_required(schema) for name, schema in definitions.items()}
    run = definitions["RunConfig"]
    keys: dict[str, Schema] = run["properties"]
    for name, section in SECTIONS.items():
        keys[name] = {"$ref": f"#/$defs/{name}"}
        definitions[name] = _section(name, section, definitions)
        required[name] = ["name", *_common([required[kind.__name__] for kind in section.built_in])]
    keys["metrics"]["items"] = _name(list(METRICS))
    _complete_name(definitions[StepOptions.__name__], StepOptions)
    keys["step"]["anyOf"].append({"type": "string", **_OWN_OBJECT})
    keys["extends"] = {"type": "string", "description": "A run of this file, a built-in recipe, or another file."}
    within = {key: {"required": need} for key, schema in keys.items() if (need := required.get(_target(schema)))}
    run["if"] = {"not": {"required": ["extends"]}}  # a run that extends another one has the keys of that one, too
    run["then"] = {"required": required["RunConfig"], "properties": within}
    return {
        "$schema": _DIALECT,
        "title": "Recipe of tutti",
        "type": "object",
        "properties": dict.fromkeys(keys, True),  # for completion at the top of an empty file
        "if": {"anyOf": [{"required": [key]} for key in keys]},
        "then": {"$ref": "#/$defs/RunConfig"},
        "else": {"additionalProperties": {"$ref": "#/$defs/RunConfig"}},
        "$defs": definitions,
    }


def _section(name: str, section: OneOf, definitions: dict[str, Schema]) -> Schema:
    """A section in which `name` selects the part whose options are the other keys.

    Without a name, in a run that extends another one, any option may be of the part that is selected there.
    """
    names = names_of(name)
    chosen = [({"const": part}, kind) for part, kind in zip(names, section.built_in, strict=True)]
    chosen.append((_OWN_OBJECT, section.user))
    options = {key: True for kind in section.built_in for key in definitions[kind.__name__]["properties"]}
    return {
        "type": "object",
        "properties": options | {"name": _name(names)},
        "allOf": [
            {
                "if": {"required": ["name"], "properties": {"name": condition}},
                "then": {"$ref": f"#/$defs/{kind.__name__}"},
            }
            for condition, kind in chosen
        ],
    }


def _name(names: list[str]) -> Schema:
    """A built-in name or `module:object`."""
    return {"type": "string", "anyOf": [{"enum": names}, _OWN_OBJECT], "examples": [*names, "module:object"]}


def _complete_name(schema: Schema, kind: type[PartOptions]) -> None:
    """Have the name of a user's own part contain a colon, which built-in names do not."""
    if "const" not in schema["properties"]["name"]:
        schema["properties"]["name"] |= _OWN_OBJECT
        schema["description"] = inspect.getdoc(kind)


def _take_required(schema: Schema) -> list[str]:
    """Remove the list of required keys from a group: a run that extends another one may leave them out."""
    return schema.pop("required", [])


def _common(lists: list[list[str]]) -> list[str]:
    return [key for key in lists[0] if key != "name" and all(key in other for other in lists)]


def _target(schema: Schema) -> str:
    """The name of the definition to which a key refers, if it does."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _describe(definitions: dict[str, Schema]) -> None:
    """Describe keys by the comments beside their fields."""
    models = _descendants(Section)
    comments = {name: found for module in {model.__module__ for model in models} for name, found in _comments(module)}
    for model in models:
        keys: dict[str, Schema] = definitions.get(model.__name__, {}).get("properties", {})
        for name, field in model.model_fields.items():
            texts = (comments.get(kind.__name__, {}).get(name) for kind in model.__mro__)
            if (text := next(filter(None, texts), None)) and (key := field.alias or name) in keys:
                keys[key]["description"] = text


def _comments(module: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The classes of a module, with the comments of their fields by name."""
    for text in inspect.getsource(importlib.import_module(module)).split("\nclass ")[1:]:
        yield re.split(r"\W", text, maxsplit=1)[0], dict(_COMMENT.findall(text))


def _descendants(model: type[Section]) -> list[type[Section]]:
    below = model.__subclasses__()
    return [*below, *(each for child in below for each in _descendants(child))]
