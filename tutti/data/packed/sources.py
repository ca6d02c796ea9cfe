"""What can be packed: a tree of images, the tar files of ImageNet, and any map-style dataset."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tutti.config.options import locate
from tutti.config.parts import call
from tutti.data.image_files import SPLITS, SUFFIXES, ImageFiles, class_names, split_folder
from tutti.errors import ConfigError, DataError, nearest


class SourceSplit(Protocol):
    """The samples of one split of a source, in the order in which they are packed."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def label(self, index: int) -> int: ...

    def read(self, index: int) -> bytes: ...


class PackSource:
    """Splits with the same classes, and whether their samples are encoded images or arrays."""

    def __init__(self, kind: str, classes: list[str], splits: dict[str, SourceSplit]) -> None:
        self.kind, self.classes, self.splits = kind, classes, splits


def open_source(source: str, validation: Path | None = None, labels: Path | None = None) -> PackSource:
    """Opens a folder of images, a tar file of classes, or `module:object`."""
    if (validation is None) != (labels is None):
        raise ConfigError(
            "--validation and --labels belong together: expected the tar of the validation images and a text file "
            "with the class of each. Give both, or neither."
        )
    path = Path(source)
    try:
        if path.is_dir():
            return _open_tree(path)
        if path.is_file():
            return _open_tars(path, validation, labels)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    if ":" in source:
        return _open_dataset(source)
    raise DataError(
        f"{source} does not exist: expected a folder with train/CLASS/*.jpg, a tar file of classes, or a dataset as "
        "module:object."
    )


# A tree of images.


def _open_tree(root: Path) -> PackSource:
    classes = class_names(root)
    splits: dict[str, SourceSplit] = {"train": ImageFiles(root, "train", classes)}
    if any((root / name).is_dir() for name in SPLITS["valid"]):
        split_folder(root, "valid")
        splits["valid"] = ImageFiles(root, "valid", classes)
    return PackSource("images", classes, splits)


# Tar files.


class TarImages:
    """Images inside an uncompressed tar file, or inside tar files in it."""

    def __init__(self, path: Path, entries: list[tuple[int, str, int, int]]) -> None:
        self._path = path
        entries.sort()  # by class and name
        self._labels = np.array([label for label, *_ in entries], np.int32)
        self._names = [name for _, name, *_ in entries]
        self._places = np.array([place for *_, place, _ in entries], np.int64)
        self._lengths = np.array([length for *_, length in entries], np.int64)
        self._handle: int | None = None

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def read(self, index: int) -> bytes:
        try:
            if self._handle is None:
                self._handle = os.open(self._path, os.O_RDONLY)
            return os.pread(self._handle, int(self._lengths[index]), int(self._places[index]))
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}.") from error


def _open_tars(train: Path, validation: Path | None, labels: Path | None) -> PackSource:
    """Opens a tar with one tar or one folder for each class, and a tar of validation images with their classes."""
    found = _list_images(train)
    classes = sorted({name.split("/")[0] for name, *_ in found if "/" in name})
    if not classes or any("/" not in name for name, *_ in found):
        raise DataError(
            f"{train} holds no classes: expected a tar file for each class in it, as in ILSVRC2012_img_train.tar, or "
            "folders CLASS/ with images."
        )
    numbers = {name: label for label, name in enumerate(classes)}
    splits: dict[str, SourceSplit] = {
        "train": TarImages(train, [(numbers[name.split("/")[0]], name, *place) for name, *place in found])  # pyright: ignore
    }
    if validation is not None and labels is not None:
        images = _list_images(validation)
        named = _read_labels(labels, sorted(name for name, *_ in images), numbers)
        entries = [(numbers[named[name]], f"{named[name]}/{name.split('/')[-1]}", *place) for name, *place in images]
        splits["valid"] = TarImages(validation, entries)  # pyright: ignore
    return PackSource("images", classes, splits)


def _list_images(path: Path) -> list[tuple[str, int, int]]:
    """The name, position and length of every image; names begin with the class where there are classes."""
    found: list[tuple[str, int, int]] = []
    above: set[str] = set()  # the folders of the classes
    try:
        with tarfile.open(path, "r:") as outer:
            for member in outer:
                name = member.name.removeprefix("./")
                if member.isfile() and name.endswith(".tar"):
                    content = outer.extractfile(member)
                    assert content is not None
                    above.add(os.path.dirname(name))
                    with tarfile.open(fileobj=content, mode="r:") as inner:
                        folder = os.path.basename(name).removesuffix(".tar")
                        found += [
                            (
                                f"{folder}/{os.path.basename(each.name)}",
                                member.offset_data + each.offset_data,
                                each.size,
                            )
                            for each in inner
                            if each.isfile() and _is_image(each.name)
                        ]
                elif member.isfile() and _is_image(name):
                    above.add(os.path.dirname(os.path.dirname(name)))
                    found.append(("/".join(name.split("/")[-2:]), member.offset_data, member.size))
    except tarfile.TarError as error:
        raise DataError(
            f"{path} cannot be read as an uncompressed tar file ({error}): expected ImageNet's own, or one with "
            "folders CLASS/. Fetch it again, or decompress it."
        ) from error
    if not found:
        raise DataError(f"{path} holds no images: expected files that end in {', '.join(SUFFIXES)}.")
    if len(above) > 1:  # splits, whose classes have the same names, or folders between a class and its images
        first, second = (f"{each or '.'}/" for each in sorted(above)[:2])
        raise DataError(
            f"{path} has folders of images in {first} and in {second}: expected the folders of all classes side by "
            "side. Extract it, and pack a folder with train/CLASS/ and validation/CLASS/."
        )
    return found


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not os.path.basename(name).startswith(".")


def _read_labels(path: Path, names: list[str], classes: dict[str, int]) -> dict[str, str]:
    """The class of every image: one in each line in the order of names, or a name and a class in each line."""
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} cannot be read as text ({error}): expected CLASS or NAME CLASS in each line."
        ) from error
    lines = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    if all(len(words) == 1 for words in lines):
        if len(lines) != len(names):
            raise DataError(f"{path} has {len(lines):,} lines: expected {len(names):,}, one for each validation image.")
        found = dict(zip(names, (words[0] for words in lines), strict=True))
    else:
        given = {words[0].rpartition("/")[2].split(".")[0]: words[1] for words in lines if len(words) > 1}
        found = {name: given.get(name.rpartition("/")[2].split(".")[0], "") for name in names}
    for name, label in found.items():
        if label not in classes:
            given_label = f"the class {label!r}" if label else "no class"
            raise DataError(
                f"{path} gives {given_label} for {name}: expected the name of a class of the training images, such as "
                f"{next(iter(classes))}, in a line for each image in the order of names, or NAME CLASS in each line."
                f"{nearest(label, classes)}"
            )
    return found


# Map-style datasets.

_MOST_LABEL = np.iinfo(np.int32).max  # in the index


class DatasetSamples:
    """Arrays or tensors of a map-style dataset as .npy, or with targets that are no labels as .npz."""

    def __init__(self, dataset: Any, target: str) -> None:
        self._dataset, self._target = dataset, target
        self._last: tuple[int, bytes, int] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, index: int) -> str:
        return f"{index:09d}"  # the suffix follows from the content

    def label(self, index: int) -> int:
        return self._encoded(index)[1]

    def read(self, index: int) -> bytes:
        return self._encoded(index)[0]

    def _encoded(self, index: int) -> tuple[bytes, int]:
        if self._last is None or self._last[0] != index:
            self._last = (index, *self._encode(index))
        return self._last[1:]

    def _encode(self, index: int) -> tuple[bytes, int]:
        try:
            sample = self._dataset[index]
        except Exception as error:
            raise DataError(
                f"sample {index} of {self._target} failed with {type(error).__name__}: {error}. Correct the dataset."
            ) from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(
                f"sample {index} of {self._target} is a {type(sample).__name__}: expected a pair (input, target) of "
                "arrays, tensors or numbers."
            )
        inputs, targets = (self._as_array(value, index) for value in sample)
        content = io.BytesIO()
        if targets.ndim == 0 and targets.dtype.kind in "iu" and abs(int(targets)) <= _MOST_LABEL:
            np.save(content, inputs, allow_pickle=False)
            return content.getvalue(), int(targets)
        np.savez(content, allow_pickle=False, inputs=inputs, targets=targets)
        return content.getvalue(), -1

    def _as_array(self, value: Any, index: int) -> np.ndarray:
        try:
            array = value.numpy(force=True) if hasattr(value, "detach") else np.asarray(value)
            problem = "" if array.dtype.kind in "biufc" else "expected arrays, tensors or numbers"
        except (TypeError, ValueError) as error:  # bfloat16, sparse tensors, lists of different lengths
            array, problem = np.empty(0), f"{error}. Expected what NumPy has as an array"
        if problem:
            raise DataError(f"sample {index} of {self._target} holds a {type(value).__name__}: {problem}.")
        return array


def _open_dataset(target: str) -> PackSource:
    """Opens `module:object`, which is called with split="train" and split="valid" where it takes a split."""
    import inspect

    made = locate(target)
    takes_split = "split" in inspect.signature(made).parameters
    splits: dict[str, SourceSplit] = {}
    for split in ("train", "valid") if takes_split else ("train",):
        dataset = call(made, "SOURCE", {}, split=split)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
            raise DataError(
                f"{target} returned a {type(dataset).__name__}: expected a dataset with __len__ and __getitem__, and "
                "at least one sample."
            )
        splits[split] = DatasetSamples(dataset, target)
    return PackSource("arrays", [], splits)
