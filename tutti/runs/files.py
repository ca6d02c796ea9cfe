"""Files that are complete or absent, and JSON files read with validation."""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

_ASIDE = re.compile(
    r"\.(?!job\.json\.).+\.\d+"
)  # an incomplete file with the number of its process; job.json has other writers


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace a file's content so that a crash at any moment leaves the old or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside a file for a library to write to; at the end it is durable and takes the name of the file."""
    aside = path.with_name(f".{os.getpid()}.{path.name}")  # libraries choose a format by the suffix
    try:
        yield aside
        sync_path(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what `write_durably` has left of files where its process was killed; no process may write them now."""
    for path in folder.glob(f".{name}.*"):
        if _ASIDE.fullmatch(path.name) and path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


def sync_path(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Kind = TypeVar("Kind")


def read_json(path: Path) -> Any:
    """The value in a file."""
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> Any:
    """The value of a JSON text, of which every string can be printed."""
    text = content.decode()
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair decodes, and cannot be encoded again
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    return value


def list_in(content: Any, key: str) -> list[Any]:
    """The list at a key of an object."""
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"expected a JSON object with a list {key!r}")
    return found


def write_dataclass(path: Path, value: Any, indent: int = 2) -> None:
    """Write a dataclass as a JSON object, durably."""
    write_durably(path, json.dumps(dataclasses.asdict(value), indent=indent) + "\n")


def read_dataclass(path: Path, kind: type[Kind]) -> Kind:
    """The content of a file as an instance of a dataclass."""
    return to_dataclass(read_json(path), kind)


def to_dataclass(content: Any, kind: type[Kind], extra: Literal["forbid", "ignore"] = "forbid") -> Kind:
    """Plain values as an instance of a dataclass, if every key and every type is as the class declares.

    Other keys are an error, or with `extra="ignore"` left out. A ValueError of `__post_init__` is one here too.
    """
    import pydantic

    try:
        return _adapter(kind).validate_json(json.dumps(content), strict=True, extra=extra)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ".".join(map(str, found["loc"]))
        reason = found["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}: {reason}" if place else reason) from None


@functools.cache
def _adapter(kind: type[Any]) -> Any:
    import pydantic

    return pydantic.TypeAdapter(kind)
