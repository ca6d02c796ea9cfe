"""MNIST from its original IDX files, gzipped or not."""

import gzip
import math
import struct
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch

from tutti.data.dataset import ArrayDataset, check_labels
from tutti.errors import DataError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "valid": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
MEAN, STD = 0.1307, 0.3081  # of the training pixels, scaled to 0..1
CLASSES = 10
AGAIN = "Fetch it again with: tutti data get mnist."
_UNSIGNED_BYTES = 0x08
_MOST_COMPRESSION = 1032  # largest ratio of the deflate algorithm


def mnist(split: str, path: str = "data/mnist", shift: int = 0) -> ArrayDataset:
    """Returns MNIST; the test images are the validation split."""
    images_file, labels_file = (find_file(Path(path), name) for name in FILES[split])
    images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} holds {len(images)} images, {labels_file} {len(labels)} labels: expected equal."
        )
    if not images.size:
        raise DataError(f"{images_file} holds no pixels, its shape is {images.shape}: expected some. {AGAIN}")
    check_labels(labels, CLASSES, str(labels_file), AGAIN)
    inputs = torch.from_numpy(images).unsqueeze(1)
    targets = torch.from_numpy(labels.astype(np.int64))
    shift = shift if split == "train" else 0
    return ArrayDataset(inputs, targets, mean=255 * MEAN, std=255 * STD, shift=shift)


def find_file(folder: Path, name: str) -> Path:
    """Returns the path of an MNIST file, plain or gzipped."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"MNIST file {name}[.gz] is not in {folder}. Fetch it with: tutti data get mnist --out {folder}. "
        "Or set data.path=FOLDER, or TUTTI_DATA to the folder that holds mnist/."
    )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads an IDX file of bytes; raises DataError if it is truncated or of another type."""
    size = 4 + 4 * dimensions
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            header = file.read(size)
            if len(header) < size or header[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
                raise DataError(
                    f"{path} is not an IDX file of bytes in {dimensions} dimension(s): it begins with "
                    f"{header[:4].hex()}."
                )
            shape = struct.unpack(f">{dimensions}I", header[4:])
            expected = math.prod(shape)
            most = path.stat().st_size * _MOST_COMPRESSION  # so that a wrong header does not allocate memory
            content = file.read(min(expected, most) + 1)
            found = len(content) if len(content) <= expected else len(content) + _count_rest(file, most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. {AGAIN}") from error
    if found != expected:
        how = "truncated" if found < expected else "too long"
        raise DataError(
            f"{path} is {how}: its header states {size + expected:,} bytes, it has {size + found:,}. {AGAIN}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape).copy()


def _count_rest(file: gzip.GzipFile | BufferedReader, most: int) -> int:
    """Counts the remaining bytes of a file and stops after about `most`."""
    count = 0
    while count < most and (chunk := file.read(1 << 20)):
        count += len(chunk)
    return count
