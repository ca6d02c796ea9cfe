"""Images and labels from the forms in which CIFAR-10 is given out: binary batches, Python pickles, image files."""

import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tutti.data.cifar10_files import AGAIN, BATCHES, EXPECTED, TREES, Files, content_of, place_of
from tutti.data.dataset import check_labels
from tutti.data.decoded import Split
from tutti.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)

_RECORD = 1 + 3 * 32 * 32  # bytes of a label and its pixels
_MOST_RECORDS = 10_000
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")


def decode(split: str, files: Files, source: Path) -> Split:
    """Images and labels from whichever of the three forms the files have."""
    for ending, parse in ((".bin", _parse_binary), ("", _parse_pickle)):
        form = {name: [f"{batch}{ending}" for batch in batches] for name, batches in BATCHES.items()}
        if not files.keys().isdisjoint(form["train"] + form["valid"]):
            parsed = [parse(content_of(files, name, source), place_of(files, name, source)) for name in form[split]]
            images, labels = (np.concatenate(part) for part in zip(*parsed, strict=True))
            return images.reshape(-1, *SHAPE), labels
    return _decode_tree(split, files, source)


def _parse_binary(content: bytes, place: str) -> Split:
    count, rest = divmod(len(content), _RECORD)
    if rest or not 1 <= count <= _MOST_RECORDS:
        how = "truncated" if count < _MOST_RECORDS else "too long"
        raise DataError(
            f"{place} is {how}: it has {len(content):,} bytes, expected whole records of {_RECORD:,} bytes, at most "
            f"{_MOST_RECORDS:,} of them. {AGAIN}"
        )
    records = np.frombuffer(content, np.uint8).reshape(count, _RECORD)
    return records[:, 1:], _checked(records[:, 0], place)


def _parse_pickle(content: bytes, place: str) -> Split:
    try:
        batch = {key if isinstance(key, str) else key.decode(): value for key, value in _Arrays(content).load().items()}
        images, labels = np.asarray(batch["data"]), np.asarray(batch["labels"])
        wanted = (labels.size, _RECORD - 1)
        if images.dtype != np.uint8 or images.shape != wanted or labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"data of {images.dtype}, shape {images.shape}, with {labels.size} labels")
        if not 1 <= labels.size <= _MOST_RECORDS:
            raise ValueError(f"{labels.size:,} images, expected 1 to {_MOST_RECORDS:,}")
    except Exception as error:  # a broken pickle can raise anything
        raise DataError(
            f"{place} is not a batch of CIFAR-10's Python version: {type(error).__name__}: {error}. {AGAIN}"
        ) from error
    return images, _checked(labels, place)


def _new_array(*_: Any) -> np.ndarray:
    """An array to be filled; what the file says of its shape before the bytes come is not believed."""
    return np.empty(0, np.uint8)


def _new_type(name: Any, *_: Any) -> np.dtype[Any]:
    made = np.dtype(name.decode() if isinstance(name, bytes) else name, False, True)
    if made.kind not in "iuf":
        raise pickle.UnpicklingError(f"it holds an array of {made}, expected numbers")
    return made


class _Arrays(pickle._Unpickler):  # pyright: ignore[reportAttributeAccessIssue]
    """Reads plain values and numpy arrays, and refuses every other object, because a pickle can name any function.

    In Python: the unpickler in C sets aside as much memory as a damaged number in the file asks for.
    """

    _KNOWN: dict[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _new_array,
        ("numpy._core.multiarray", "_reconstruct"): _new_array,
        ("numpy", "ndarray"): None,  # told to _reconstruct alone
        ("numpy", "dtype"): _new_type,
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such file needs")
        return self._KNOWN[module, name]


def _checked(labels: np.ndarray, place: str) -> np.ndarray:
    check_labels(labels, len(CLASSES), place, AGAIN)
    return labels.astype(np.int64)


def _decode_tree(split: str, files: Files, source: Path) -> Split:
    """The images of class folders in the order of class and file names; a label is the place of its class."""
    trees = {name: next((tree for tree in TREES[name] if _classes(files, tree)), "") for name in TREES}
    classes = {name: _classes(files, tree) for name, tree in trees.items()}
    _check_classes(trees, classes, source)
    names = [sorted(images) for _, images in sorted(classes[split].items())]
    images = np.empty((sum(map(len, names)), *SHAPE), np.uint8)
    for row, name in enumerate(itertools.chain.from_iterable(names)):
        images[row] = _decode_image(content_of(files, name, source), place_of(files, name, source))
    return images, np.repeat(np.arange(len(names), dtype=np.int64), [len(of_class) for of_class in names])


def _classes(files: Files, tree: str) -> dict[str, list[str]]:
    """The names of the images in every class folder of a tree."""
    classes: dict[str, list[str]] = {}
    for name, content in files.items():
        parts = name.split("/")
        if parts[0] == tree:
            images = classes.setdefault(parts[1], [])
            if content is not None and name.lower().endswith(_IMAGE_ENDINGS):
                images.append(name)
    return classes


def _check_classes(trees: dict[str, str], classes: dict[str, dict[str, list[str]]], source: Path) -> None:
    """Both splits have the same ten classes, and images in each."""
    if not all(trees.values()):
        kept = [f"{tree}/" for tree in trees.values() if tree]
        raise DataError(f"{source} holds {kept[0] + ' only' if kept else 'no CIFAR-10'}. {EXPECTED}")
    for name, tree in trees.items():
        other = trees["valid" if name == "train" else "train"]
        if missing := sorted(set().union(*classes.values()) - classes[name].keys()):
            raise DataError(
                f"{source}: {tree}/ lacks the class {', '.join(missing)} that {other}/ has: expected the same classes "
                f"in both. {AGAIN}"
            )
        if empty := sorted(kind for kind, images in classes[name].items() if not images):
            raise DataError(
                f"{source}: the class folder {tree}/{empty[0]} holds no images: expected {', '.join(_IMAGE_ENDINGS)} "
                f"files. {AGAIN}"
            )
    if len(found := sorted(classes["train"])) != len(CLASSES):
        raise DataError(
            f"{source} holds {len(found)} classes ({', '.join(found)}): expected CIFAR-10's {len(CLASSES)}. {AGAIN}"
        )


def _decode_image(content: bytes, place: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except Exception as error:  # Pillow raises many kinds for broken files
        raise DataError(f"{place} cannot be read as an image: {error}. {AGAIN}") from error
    if pixels.shape != SHAPE:
        _, height, width = pixels.shape
        raise DataError(f"{place} is {width} x {height} pixels: expected 32 x 32. Is it CIFAR-10?")
    return pixels
