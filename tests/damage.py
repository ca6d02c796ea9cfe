"""Files as accidents leave them: random bytes, files that are cut short or changed, JSON with other values."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tutti.errors import TuttiError

Read = TypeVar("Read")
MISSING = object()  # in the place of a value: the key is taken out

JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "/", "..", "\x00", "NaN", "step-1"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none(), max_size=3),
)


def many(examples: int) -> settings:
    """Settings of a test of that many examples, the same ones each time."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Random bytes, or the content truncated, with bytes changed, inserted, removed or repeated."""
    place = draw(st.integers(0, max(0, len(content) - 1)))
    some = st.binary(min_size=1, max_size=8)
    kind = draw(st.sampled_from(["random", "truncate", "flip", "change", "insert", "remove", "append", "repeat"]))
    if kind == "random":
        return draw(st.binary(max_size=64))
    if kind == "truncate":
        return content[:place]
    if kind == "flip":
        bit = 1 << draw(st.integers(0, 7))
        return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
    if kind == "change":
        new = draw(some)
        return content[:place] + new + content[place + len(new) :]
    if kind == "insert":
        return content[:place] + draw(some) + content[place:]
    if kind == "remove":
        return content[:place] + content[place + draw(st.integers(1, 64)) :]
    if kind == "append":
        return content + draw(some)
    return content[:place] + content


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value in which one value, at any depth, is another one or missing."""
    path = draw(st.sampled_from(list(_paths(value))))
    new = draw(st.just(MISSING) | JSON_VALUES) if path else draw(JSON_VALUES)
    if not path:
        return new
    made = copy.deepcopy(value)
    *above, last = path
    target = made
    for key in above:
        target = target[key]
    if new is MISSING:
        del target[last]
    else:
        target[last] = new
    return made


def damaged_json(value: Any) -> st.SearchStrategy[bytes]:
    """A file of JSON that is damaged, or that holds another value somewhere."""
    return damaged(json.dumps(value, indent=1).encode()) | changed(value).map(lambda made: json.dumps(made).encode())


def read_or_refuse(read: Callable[[], Read], named: object) -> Read | None:
    """What a reader gives; None where it refuses with an error for the user that names the file."""
    try:
        return read()
    except TuttiError as error:
        said = f"{type(error).__name__}: {error}"
    assert str(named) in said, f"{named} is not named in {said}"
    return None


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _paths(each, (*above, key))
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _paths(each, (*above, place))
