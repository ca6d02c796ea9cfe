"""MNIST from its original IDX files, gzipped or not."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from tutti.data.dataset import ArrayDataset
from tutti.errors import DataError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "valid": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
MEAN, STD = 0.1307, 0.3081  # of the training pixels, scaled to 0..1
_UNSIGNED_BYTES = 0x08


def mnist(split: str, path: str = "data/mnist", shift: int = 0) -> ArrayDataset:
    """The training images, or the test images as validation."""
    images_file, labels_file = (find_file(Path(path), name) for name in FILES[split])
    images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} holds {len(images)} images, {labels_file} {len(labels)} labels: expected equal."
        )
    inputs = torch.from_numpy(images).unsqueeze(1)
    targets = torch.from_numpy(labels.astype(np.int64))
    shift = shift if split == "train" else 0
    return ArrayDataset(inputs, targets, mean=255 * MEAN, std=255 * STD, shift=shift)


def find_file(folder: Path, name: str) -> Path:
    """One of MNIST's files as it is, or gzipped."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"MNIST file {name}[.gz] is not in {folder}. Fetch it with: tutti data get mnist --out {folder}. "
        "Or set data.path=FOLDER, or TUTTI_DATA to the folder that holds mnist/."
    )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array of bytes in an IDX file; a file that is cut short or of another kind is refused."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Fetch it again with: tutti data get mnist.") from error
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
        raise DataError(
            f"{path} does not open as an IDX file of bytes in {dimensions} dimension(s): found {content[:4].hex()}."
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + int(np.prod(shape))
    if len(content) != expected:
        how = "truncated" if len(content) < expected else "not what it says"
        raise DataError(
            f"{path} is {how}: its header promises {expected:,} bytes, it has {len(content):,}. "
            "Fetch it again with: tutti data get mnist."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()
