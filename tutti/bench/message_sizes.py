"""Sizes of messages in words and in bytes; KB, MB and GB are powers of 1024 here."""

import re

from tutti.errors import ConfigError

DEFAULT_SIZES = tuple(4**power * 1024 for power in range(9))  # 1 KB to 64 MB
_UNITS = {"": 1, "B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}
_EXPECTED = "expected sizes of 4 B or more, in B, KB, MB or GB, as in --sizes 1KB,1MB."


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """The sizes in a list such as 1KB,1MB, smallest first; those that are usual where none is given."""
    if text is None:
        return DEFAULT_SIZES
    return tuple(sorted({_parse(word.strip()) for word in text.split(",")}))


def _parse(word: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", word)
    factor = _UNITS.get(found[2].upper()) if found else None
    if found is None or factor is None or (size := int(float(found[1]) * factor)) < 4:
        raise ConfigError(f"--sizes: {word!r} is not the size of a message: {_EXPECTED}")
    return size


def show_size(size: float) -> str:
    """A size with three digits and its unit."""
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GB"
