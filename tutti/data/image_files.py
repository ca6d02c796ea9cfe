"""The image files of a folder tree: one folder for each class, in the global order of samples."""

import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from tutti.errors import DataError, nearest

SPLITS = {"train": ("train",), "valid": ("validation", "val", "valid", "test")}
SUFFIXES = (".jpg", ".jpeg", ".png")
_MAKE = "Or make generated images to try with: tutti data make images --out"


class CorruptImage(DataError):
    """An image that can be read but not decoded, or that has changed since it was stored."""


class ImageFiles:
    """The image files of a split, sorted by class and name, in compact memory: ImageNet has 1.28 million."""

    def __init__(self, root: Path, split: str, classes: list[str]) -> None:
        self.classes = classes
        self._folder = split_folder(root, split)
        found = _scan(self._folder, classes, root)
        counts = [len(found.get(name, ())) for name in classes]
        self._starts = np.array([0, *accumulate(counts)])  # of each class, and the end
        # One bytes object with offsets: reference counts of a list of strings would copy it into every worker.
        names = [os.fsencode(file) for name in classes for file in found.get(name, ())]
        self._names = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def label(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def path(self, index: int) -> str:
        name = os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])
        return os.path.join(self._folder, self.classes[self.label(index)], name)

    def name(self, index: int) -> str:
        """The class and the file name of an image."""
        return f"{self.classes[self.label(index)]}/{os.path.basename(self.path(index))}"

    def read(self, index: int) -> bytes:
        path = self.path(index)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. Check that it is there and readable.") from error

    def original_size(self, index: int) -> tuple[int, int] | None:
        """The width and height before an image was stored, if they may differ from those of its content."""
        return None

    def rest_of_class(self, index: int) -> Iterator[int]:
        """Yields an index, then the other indices of its class in cyclic order."""
        yield index
        first, end = map(int, self._starts[self.label(index) : self.label(index) + 2])
        yield from range(index + 1, end)
        yield from range(first, index)


def class_names(root: Path, count: int | None = None) -> list[str]:
    """Returns the sorted folder names of the training split; only the first `count` if given."""
    folder = split_folder(root, "train")
    names = _folders(folder)
    if not names:
        raise DataError(f"{folder} holds no folders: expected one for each class, with images. {_MAKE} FOLDER.")
    if count is not None and not 1 <= count <= len(names):
        raise DataError(
            f"data.classes={count}, but {folder} holds {len(names)} classes: expected 1 to {len(names)}. "
            "Leave data.classes out to use all."
        )
    return names[:count]


def split_folder(root: Path, split: str) -> Path:
    for name in SPLITS[split]:
        if (root / name).is_dir():
            return root / name
    expected = " or ".join(f"{name}/" for name in SPLITS[split])
    raise DataError(
        f"{root} holds no {expected}: expected a folder for each class in it. Set data.path=FOLDER to the folder that "
        f"holds train/ and validation/. {_MAKE} {root}."
    )


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _scan(folder: Path, classes: list[str], root: Path) -> dict[str, list[str]]:
    """The image files of each class, sorted."""
    chosen, known = set(classes), set(class_names(root))
    found: dict[str, list[str]] = {}
    for name in _folders(folder):
        if name not in known:
            raise DataError(
                f"{folder / name} is a class that {split_folder(root, 'train')} does not have.{nearest(name, known)} "
                "Expected the same classes in both: rename or remove it."
            )
        if name in chosen:
            with os.scandir(folder / name) as entries:
                files = [entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES)]
            found[name] = sorted(file for file in files if not file.startswith("."))
            if not found[name]:
                raise DataError(
                    f"{folder / name} holds no images: expected files that end in {', '.join(SUFFIXES)}. "
                    "Fill the folder, or remove it."
                )
    if not found:
        raise DataError(f"{folder} holds none of the classes of the run: expected folders such as {classes[0]}/.")
    return found


def as_rgb(image: Any) -> Any:
    """Converts an image of any mode to RGB without transparency."""
    if image.mode.startswith("I"):  # of 16 bits, which Pillow would cut off at 255
        from PIL import Image

        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    if image.mode == "P":
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def find_reason(error: Exception, content: bytes) -> str:
    """Why an image cannot be decoded, in a few words."""
    if not content:
        return "it is empty"
    if "cannot identify image" in str(error):  # Pillow's message has only the address of a buffer
        return f"it begins with {content[:4].hex(' ')}"
    return str(error) or type(error).__name__
