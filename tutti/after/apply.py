"""A trained model applied to inputs: samples in batches, and volumes that are larger than a crop in tiles."""

import contextlib
import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from tutti.after.run import ChosenCheckpoint, OpenedRun
from tutti.after.tiles import Predict, Tiles, by, plan_tiles
from tutti.config import parts
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, DataError, FolderError
from tutti.runs.files import replacing
from tutti.train.learner import autocast

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
HDF5 = (".h5", ".hdf5", ".hdf")
OUTPUTS = (".npy", *HDF5, ".csv")
_SAMPLES = 64  # in a batch, where the recipe does not say

Report = Callable[[int, int], None]  # what is done, of how much


@dataclass(frozen=True)
class GivenInputs:
    """Inputs that are read when they are needed, of the shape (samples, channels, ...) of the model's inputs."""

    shape: tuple[int, ...]
    read: Callable[[slice, tuple[slice, ...]], np.ndarray]  # of some samples, a window in space
    is_one: bool  # the file holds one sample without a dimension for samples
    names: tuple[str, ...] = ()


def apply(
    run: OpenedRun,
    chosen: ChosenCheckpoint,
    inputs: str,
    out: Path,
    batch: int | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    force: bool = False,
    report: Report = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...]:
    """Write the outputs of a model for all inputs into a file, whole or not at all; returns their shape."""
    _check_output(out, force)
    shape = (run.record.get("data") or {}).get("input_shape")
    with open_inputs(inputs, run.config, shape) as samples:
        predict = _predictor(run, chosen)
        size = batch or run.config.batch.eval or _SAMPLES
        with replacing(out) as aside:
            is_large = shape is not None and _exceeds(samples.shape[2:], shape[1:])
            if shape is not None and is_large and run.config.framework == "torch" and _is_dense(predict, shape):
                tiles = plan_tiles(predict, shape, samples.shape[2:], tile, overlap)
                say(tiles.note)
                return _apply_tiles(samples, tiles, predict, aside, report)
            if tile is not None or overlap is not None:
                raise ConfigError(
                    "--tile and --overlap are for models that give a value for each cell, and inputs larger than the "
                    f"{by(shape[1:]) if shape else 'samples'} of training: these are {by(samples.shape[2:])}. Leave "
                    "them out."
                )
            return _apply_batches(samples, size, predict, aside, report)


def _apply_batches(samples: GivenInputs, size: int, predict: Predict, path: Path, report: Report) -> tuple[int, ...]:
    count, everywhere = samples.shape[0], tuple(slice(None) for _ in samples.shape[2:])
    with contextlib.ExitStack() as opened:
        write: Any = None
        shape: tuple[int, ...] = ()
        for start in range(0, count, size):
            found = predict(torch.from_numpy(samples.read(slice(start, min(start + size, count)), everywhere)))
            if write is None:
                shape = (count, *found.shape[1:])
                write = opened.enter_context(_opened_output(path, shape, samples))
            write(slice(start, start + len(found)), (), found.numpy())
            report(min(start + size, count), count)
    return shape[1:] if samples.is_one else shape


def _apply_tiles(samples: GivenInputs, tiles: Tiles, predict: Predict, path: Path, report: Report) -> tuple[int, ...]:
    volume, places = samples.shape[2:], list(tiles.windows(samples.shape[2:]))
    total = samples.shape[0] * len(places)
    with contextlib.ExitStack() as opened:
        write: Any = None
        shape: tuple[int, ...] = ()
        for done, (sample, windows) in enumerate(itertools.product(range(samples.shape[0]), places), start=1):
            one = slice(sample, sample + 1)
            found = predict(torch.from_numpy(samples.read(one, tuple(slice(w.start, w.stop) for w in windows))))
            if write is None:
                shape = (samples.shape[0], found.shape[1], *volume)
                write = opened.enter_context(_opened_output(path, shape, samples))
            kept = found[(..., *(slice(w.first - w.start, w.end - w.start) for w in windows))]
            write(one, tuple(slice(w.first, w.end) for w in windows), kept.numpy())
            report(done, total)
    return shape[1:] if samples.is_one else shape


def _is_dense(predict: Predict, shape: Sequence[int]) -> bool:
    """Whether a model gives values for each cell of its input."""
    found = predict(torch.zeros(1, *shape))
    return found.ndim == len(shape) + 1 and tuple(found.shape[2:]) == tuple(shape[1:])


def _predictor(run: OpenedRun, chosen: ChosenCheckpoint) -> Predict:
    """The model of a checkpoint as a function of batches, on a GPU where the recipe uses one."""
    name = run.config.model.name
    compute = _in_torch(run, chosen) if run.config.framework == "torch" else _in_keras(run, chosen)

    def predict(batch: torch.Tensor) -> torch.Tensor:
        try:
            found = compute(batch)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise DataError(
                f"{name} fails for inputs of the shape {list(batch.shape)} and the type "
                f"{str(batch.dtype).removeprefix('torch.')}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            ) from error
        if not isinstance(found, torch.Tensor) or not found.ndim or len(found) != len(batch):
            raise DataError(f"{name} gives a {type(found).__name__}: expected a tensor with a row a sample.")
        return found.float().cpu()

    return predict


def _in_torch(run: OpenedRun, chosen: ChosenCheckpoint) -> Callable[[torch.Tensor], Any]:
    from tutti.ranks.device import uses_gpus

    config = run.config
    device = torch.device("cuda" if uses_gpus(config.runtime) else "cpu")
    model = run.model(chosen.manifest.step).to(device)

    @torch.no_grad()
    def compute(batch: torch.Tensor) -> Any:
        with autocast(config.precision, device):
            return model(batch.to(device))

    return compute


def _in_keras(run: OpenedRun, chosen: ChosenCheckpoint) -> Callable[[torch.Tensor], Any]:
    model = run.model(chosen.manifest.step)
    import keras

    from tutti.frameworks.feed import as_arrays

    def compute(batch: torch.Tensor) -> Any:
        inputs, _ = as_arrays((batch, batch))
        found = model(inputs, training=False)
        if not keras.ops.is_tensor(found):
            return found
        return torch.from_numpy(np.array(keras.ops.convert_to_numpy(found), np.float32))  # also of bfloat16

    return compute


@contextlib.contextmanager
def open_inputs(given: str, config: RunConfig, shape: Sequence[int] | None) -> Iterator[GivenInputs]:
    """The inputs that are meant by a file of NumPy, FILE:DATASET of HDF5, an image, or a folder of images."""
    path, name = Path(given), ""
    if not path.exists() and ":" in given:
        path, name = Path(given.rpartition(":")[0]), given.rpartition(":")[2]
    if not path.exists():
        raise DataError(f"{given}: no such file. Give a .npy file, FILE.h5:DATASET, an image or a folder of images.")
    if path.is_dir() or path.suffix.lower() in IMAGES:
        yield _images(path, config, shape)
    elif path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as an array of NumPy: {error}") from error
        yield _array(path, array, config, shape)
    elif path.suffix.lower() in HDF5:
        with _hdf5(path) as file:
            if not isinstance(file.get(name) if name else None, h5py.Dataset):
                known = [str(key) for key in file if isinstance(file[key], h5py.Dataset)]
                raise DataError(f"{given}: expected {path}:DATASET, with one of {', '.join(known) or 'no datasets'}.")
            yield _array(path, file[name], config, shape)
    else:
        raise DataError(f"{given}: expected a .npy file, FILE.h5:DATASET, an image or a folder of images.")


def _hdf5(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} cannot be opened as an HDF5 file: {error}.") from error


def _array(path: Path, array: Any, config: RunConfig, shape: Sequence[int] | None) -> GivenInputs:
    """Samples of an array, or one; bytes are normalised as the run's dataset does it, other numbers are kept."""
    is_one = shape is not None and array.ndim == len(shape)
    found = (1, *array.shape) if is_one else tuple(array.shape)
    if array.dtype.kind not in "fiub" or (shape is not None and len(found) != len(shape) + 1) or 0 in found:
        raise DataError(
            f"{path} holds {array.dtype} of the shape {list(array.shape)}: expected numbers for inputs of the shape "
            f"{list(shape or ())}, one or many."
        )
    if shape is not None and len(shape) > 1 and found[1] != shape[0]:
        raise DataError(f"{path}: inputs of the shape {list(found[1:])} have {found[1]} channels: expected {shape[0]}.")
    normalise = _normaliser(config) if array.dtype == np.uint8 else None

    def read(samples: slice, window: tuple[slice, ...]) -> np.ndarray:
        chosen = array[(slice(None), *window)][None] if is_one else array[(samples, slice(None), *window)[: array.ndim]]
        if normalise is not None:
            return normalise(torch.from_numpy(np.array(chosen))).numpy()
        return np.array(chosen, np.float32 if array.dtype.kind == "f" else np.int64)

    return GivenInputs(found, read, is_one)


def _images(path: Path, config: RunConfig, shape: Sequence[int] | None) -> GivenInputs:
    """The images of a folder by name, or one; decoded as for validation."""
    files = sorted(each for each in path.rglob("*") if each.suffix.lower() in IMAGES) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no images: expected files that end in {', '.join(IMAGES)}.")
    if shape is None or len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(f"{path}: the model takes inputs of the shape {list(shape or ())}, which images do not have.")
    normalise, decode = _normaliser(config), _decoder(config, shape)

    def read(samples: slice, window: tuple[slice, ...]) -> np.ndarray:
        return normalise(torch.stack([decode(file) for file in files[samples]])).numpy()

    names = tuple(str(each.relative_to(path)) if path.is_dir() else each.name for each in files)
    return GivenInputs((len(files), *shape), read, False, names)


def _decoder(config: RunConfig, shape: Sequence[int]) -> Callable[[Path], torch.Tensor]:
    from PIL import Image

    from tutti.data.decode import centre_view, decode_view

    def decode(path: Path) -> torch.Tensor:
        try:
            if config.data.name == "images":
                out = torch.empty((shape[1], shape[2], 3), dtype=torch.uint8).permute(2, 0, 1)
                decode_view(path.read_bytes(), out, partial(centre_view, share=config.data.options()["centre"]))
                return out
            with Image.open(path) as image:
                pixels = np.array(image.convert("L" if shape[0] == 1 else "RGB"))
        except Exception as error:  # decoders raise almost anything on bytes that are wrong
            raise DataError(f"{path} cannot be decoded as an image ({type(error).__name__}: {error}).") from error
        if pixels.shape[:2] != tuple(shape[1:]):
            raise DataError(f"{path} has {by(pixels.shape[:2])} pixels: expected {by(shape[1:])}, as in training.")
        return torch.from_numpy(pixels).reshape(shape[1], shape[2], shape[0]).movedim(-1, 0)

    return decode


def _normaliser(config: RunConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the run's dataset does to bytes before a model gets them."""
    if config.data.name == "images":
        from tutti.data.image_tree import normalise

        return normalise
    offered = {"split": "valid", "device": torch.device("cpu"), "local_ranks": 1}
    data = parts.call(config.data.locate(), "data", config.data.options(), **offered)
    found = getattr(data, "normalise", None) or getattr(data, "finish", None)
    if found is None:
        raise DataError(
            f"the inputs are bytes, and data.name={config.data.name} does not say how bytes are normalised (a method "
            "normalise or finish). Give floating-point numbers as the model takes them, in a .npy or HDF5 file."
        )
    return found


def _check_output(path: Path, force: bool) -> None:
    if path.suffix.lower() not in OUTPUTS:
        raise ConfigError(f"--out {path}: expected a file that ends in {', '.join(OUTPUTS)}.")
    if path.exists() and not force:
        raise FolderError(f"{path} exists: expected a new file. Name another with --out, or replace it by --force.")
    if not path.parent.is_dir():
        raise FolderError(f"--out {path}: there is no folder {path.parent}. Create it, or choose another.")


@contextlib.contextmanager
def _opened_output(path: Path, shape: tuple[int, ...], samples: GivenInputs) -> Iterator[Callable[..., None]]:
    """A function that writes values of some samples at a place in space; what is written need not fit into memory."""
    if path.suffix == ".csv":
        if len(shape) != 2:
            raise ConfigError(
                f"--out {path.name[1:]}: outputs of the shape {list(shape[1:])} are no rows of a table. Use .npy."
            )
        with open(path, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["input", "highest", *range(shape[1])])

            def write_rows(which: slice, place: tuple[slice, ...], values: np.ndarray) -> None:
                names = samples.names or range(shape[0])
                for name, row in zip(names[which], values, strict=True):
                    rows.writerow([name, int(row.argmax()), *row.tolist()])

            yield write_rows
        return
    kept = shape[1:] if samples.is_one else shape
    with contextlib.ExitStack() as opened:
        if path.suffix == ".npy":
            array: Any = np.lib.format.open_memmap(path, "w+", np.float32, kept)
        else:
            file = opened.enter_context(h5py.File(path, "w"))
            array = file.create_dataset("outputs", kept, np.float32)
            if samples.names:
                file.create_dataset("names", data=[name.encode() for name in samples.names])

        def write(which: slice, place: tuple[slice, ...], values: np.ndarray) -> None:
            within = (slice(None), *place) if place else (...,)
            array[within if samples.is_one else (which, *within)] = values[0] if samples.is_one else values

        yield write
        if path.suffix == ".npy":
            array.flush()


def _exceeds(sides: Sequence[int], crop: Sequence[int]) -> bool:
    return len(sides) == len(crop) and any(side > each for side, each in zip(sides, crop, strict=True))
