"""CIFAR-10 from its binary files, its Python pickles, or a tree of image files; in a folder or in a tar archive."""

import contextlib
import hashlib
import io
import itertools
import os
import pickle
import tarfile
import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image

from tutti.data.dataset import ArrayDataset, Fill, Flip, check_labels
from tutti.errors import DataError

Split = tuple[np.ndarray, np.ndarray]  # images (bytes, N x C x H x W), labels (int64)


def decoded_files(
    dataset: str, splits: Iterable[str], source: Path, paths: Iterable[Path], cache: str | None
) -> dict[str, Path]:
    """Returns the cache file of each split; its name changes when the archive or any file of the tree changes."""
    key = hashlib.sha256(b"1" + bytes(source.resolve()))  # b"1": version of the cache format
    for path in sorted(paths):
        status = path.stat()
        key.update(f"{path.relative_to(source)} {status.st_size} {status.st_mtime_ns}\0".encode())
    folder = _cache_folder(cache)
    return {split: folder / f"{dataset}-{key.hexdigest()[:16]}-{split}.npz" for split in splits}


def _cache_folder(cache: str | None) -> Path:
    try:
        return Path(cache or os.environ.get("TUTTI_CACHE") or "~/.cache/tutti").expanduser()
    except RuntimeError:  # the user has no home directory
        return Path(os.devnull)


def load_decoded(place: Path, shape: tuple[int, ...]) -> Split | None:
    """Reads a split from the cache; None if it is missing, damaged or of another shape."""
    try:
        with open(place, "rb") as file, np.load(file) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except Exception:  # whatever the error, the split can be decoded again
        return None
    fits = images.dtype == np.uint8 and images.shape == (len(labels), *shape) and labels.dtype == np.int64
    return (images, labels) if fits else None


def save_decoded(place: Path, split: Split) -> None:
    """Writes a split to the cache; safe from several ranks at once, and errors of the file system are ignored."""
    temporary = place.with_name(f"{place.name}.{uuid.uuid4().hex}.part")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                np.savez(file, images=split[0], labels=split[1])
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)


BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "valid": ("test_batch",)}
TREES = {"train": ("train",), "valid": ("test", "valid", "validation")}
ARCHIVES = (".tar.xz", ".tar.gz", ".tgz", ".tar")
BATCH_FILES = frozenset(f"{name}{ending}" for names in BATCHES.values() for name in names for ending in (".bin", ""))

AGAIN = "Fetch or copy it again."
EXPECTED = (
    "Expected data_batch_1.bin ... test_batch.bin (the binary version), data_batch_1 ... test_batch (the Python "
    "version), folders train/CLASS and test/CLASS of .jpg or .png files, or one archive of these "
    f"({', '.join(ARCHIVES)}). Set data.path=FOLDER_OR_ARCHIVE, or TUTTI_DATA to the folder "
    "that holds cifar10/, or fetch it with: tutti data get cifar10."
)

_LARGEST = 1 << 26  # bytes of a batch or an image
_BATCH_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
_TREE_FOLDERS = frozenset(tree for trees in TREES.values() for tree in trees)

Files = dict[str, Path | bytes | None]  # name below the root -> where the file is, or its content; None: a folder


def find(path: Path) -> Path:
    """Returns the folder or archive to read: the path itself, the only archive in it, or `PATH.tar.gz` beside it."""
    if path.is_file() or any((path / name).exists() for name in (*_BATCH_FOLDERS, *BATCH_FILES, *_TREE_FOLDERS)):
        return path
    found = [file for file in sorted(_visible(path)) if file.name.endswith(ARCHIVES)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise DataError(f"{path} holds {len(found)} archives ({names}): expected one. Set data.path to one of them.")
    beside = (path.parent / f"{path.name}{middle}{ending}" for middle in ("", "-jpeg") for ending in ARCHIVES)
    for archive in (*found, *beside):
        if archive.is_file():
            return archive
    raise DataError(f"CIFAR-10 is not at {path}. {EXPECTED}")


def list_folder(folder: Path) -> Files:
    """Lists the batch files, or the class folders with their files; empty if there are neither."""
    batches = [folder / below / name for below in ("", *_BATCH_FOLDERS) for name in BATCH_FILES]
    if files := {path.name: path for path in batches if path.is_file()}:
        return dict(files)
    listed: Files = {}
    for tree in _TREE_FOLDERS:
        for class_folder in _visible(folder / tree):
            if class_folder.is_dir():
                prefix = f"{tree}/{class_folder.name}"
                listed |= {prefix: None} | {f"{prefix}/{file.name}": file for file in _visible(class_folder)}
    return listed


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def list_archive(path: Path) -> Files:
    """Reads from an archive, at any depth and in one pass, what `list_folder` lists, with the contents."""
    files: Files = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if name := _known_name(member):
                    if member.size > _LARGEST:
                        raise tarfile.ReadError(f"{member.name} has {member.size} bytes, more than a file of CIFAR-10")
                    content = archive.extractfile(member)
                    files[name] = content.read() if content else None
            _check_end(archive)
    except Exception as error:  # each compression library has its own exceptions
        reason = str(error).partition(":")[0]
        raise DataError(f"{path} cannot be read as a tar archive (plain, gzip or xz): {reason}. {AGAIN}") from error
    return files


def _known_name(member: tarfile.TarInfo) -> str:
    """Returns the name of a batch file, of a class folder or of a file in one; empty for other members."""
    path = PurePosixPath(member.name)
    if member.isreg() and path.name in BATCH_FILES:
        return path.name
    depth = 3 if member.isreg() else 2 if member.isdir() else len(path.parts) + 1
    parts = path.parts[-depth:]
    known = len(parts) == depth and parts[0] in _TREE_FOLDERS and not any(part.startswith(".") for part in parts)
    return "/".join(parts) if known else ""


def _check_end(archive: tarfile.TarFile) -> None:
    """Checks the end-of-archive block, which tarfile does not, and reads the rest so that checksums are verified."""
    assert archive.fileobj
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # the second of the two end blocks
        raise tarfile.ReadError("it ends without an end mark, so it is truncated or damaged")
    while archive.fileobj.read(1 << 20):
        pass


def content_of(files: Files, name: str, source: Path) -> bytes:
    """Returns the content of a file; raises DataError if it is missing."""
    content = files.get(name)
    if content is None:
        raise DataError(f"{source} lacks {name}: it holds {', '.join(sorted(files.keys() & BATCH_FILES))}. {AGAIN}")
    return content if isinstance(content, bytes) else content.read_bytes()


def place_of(files: Files, name: str, source: Path) -> str:
    """Returns the location of a file for an error message."""
    content = files[name]
    return str(content) if isinstance(content, Path) else f"{name} in {source}"


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)

_RECORD = 1 + 3 * 32 * 32  # bytes of a label and its pixels
_MOST_RECORDS = 10_000
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")


def decode(split: str, files: Files, source: Path) -> Split:
    """Decodes a split from binary batches, pickled batches or class folders."""
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
    """Returns an empty array to be filled; the shape that the file states before its bytes is ignored."""
    return np.empty(0, np.uint8)


def _new_type(name: Any, *_: Any) -> np.dtype[Any]:
    made = np.dtype(name.decode() if isinstance(name, bytes) else name, False, True)
    if made.kind not in "iuf":
        raise pickle.UnpicklingError(f"it holds an array of {made}, expected numbers")
    return made


class _Arrays(pickle._Unpickler):  # pyright: ignore[reportAttributeAccessIssue]
    """Unpickler that accepts plain values and numpy arrays only, because a pickle can call any function.

    It is the Python implementation: the one in C allocates as much memory as a damaged length field demands.
    """

    _KNOWN: dict[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _new_array,
        ("numpy._core.multiarray", "_reconstruct"): _new_array,
        ("numpy", "ndarray"): None,  # only an argument of _reconstruct
        ("numpy", "dtype"): _new_type,
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a batch of CIFAR-10 does not need")
        return self._KNOWN[module, name]


def _checked(labels: np.ndarray, place: str) -> np.ndarray:
    check_labels(labels, len(CLASSES), place, AGAIN)
    return labels.astype(np.int64)


def _decode_tree(split: str, files: Files, source: Path) -> Split:
    """Decodes class folders in the order of class and file names; a label is the index of its class."""
    trees = {name: next((tree for tree in TREES[name] if _classes(files, tree)), "") for name in TREES}
    classes = {name: _classes(files, tree) for name, tree in trees.items()}
    _check_classes(trees, classes, source)
    names = [sorted(images) for _, images in sorted(classes[split].items())]
    images = np.empty((sum(map(len, names)), *SHAPE), np.uint8)
    for row, name in enumerate(itertools.chain.from_iterable(names)):
        images[row] = _decode_image(content_of(files, name, source), place_of(files, name, source))
    return images, np.repeat(np.arange(len(names), dtype=np.int64), [len(of_class) for of_class in names])


def _classes(files: Files, tree: str) -> dict[str, list[str]]:
    """Returns the image names of every class folder below `tree`."""
    classes: dict[str, list[str]] = {}
    for name, content in files.items():
        parts = name.split("/")
        if parts[0] == tree:
            images = classes.setdefault(parts[1], [])
            if content is not None and name.lower().endswith(_IMAGE_ENDINGS):
                images.append(name)
    return classes


def _check_classes(trees: dict[str, str], classes: dict[str, dict[str, list[str]]], source: Path) -> None:
    """Checks that both splits have the same ten classes, with images in each."""
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


MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pixels, scaled to 0..1


def cifar10(
    split: str,
    path: str = "data/cifar10",
    shift: int = 0,
    flip: Flip = False,
    fill: Fill = "edge",
    cache: str | None = None,
    device: torch.device | None = None,
) -> ArrayDataset:
    """Returns CIFAR-10; the test images are the validation split."""
    try:
        images, labels = read(split, find(Path(path)), cache)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}. Check its permissions.") from error
    augmented = split == "train"
    return ArrayDataset(
        torch.from_numpy(images),
        torch.from_numpy(labels),
        mean=tuple(255 * value for value in MEAN),
        std=tuple(255 * value for value in STD),
        shift=shift if augmented else 0,
        flip=flip if augmented else False,
        fill=fill,
        device=device,
    )


def read(split: str, source: Path, cache: str | None = None) -> Split:
    """Reads a split; archives and folders of images, which are slow to decode, are cached."""
    files = {} if source.is_file() else list_folder(source)
    if not files.keys().isdisjoint(BATCH_FILES):
        return decode(split, files, source)
    paths = [path for path in files.values() if isinstance(path, Path)] or [source]
    places = decoded_files("cifar10", BATCHES, source, paths, cache)
    if kept := load_decoded(places[split], SHAPE):
        return kept
    files = files if source.is_dir() else list_archive(source)
    splits = {name: decode(name, files, source) for name in BATCHES}
    for name, place in places.items():
        save_decoded(place, splits[name])
    return splits[split]
