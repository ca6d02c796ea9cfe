"""A trained model applied to inputs: samples in batches, and volumes that are larger than a crop in tiles."""

import contextlib
import csv
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from tutti.after.run import ChosenCheckpoint, OpenedRun, build_model, check_named
from tutti.after.tiles import AppliedModel, Tiles, Transfer, by, find_most_cells, plan_tiles
from tutti.config import parts
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, DataError, FolderError
from tutti.memory.prediction import PassMemory, predict_pass
from tutti.ranks.device import applies, uses_gpus
from tutti.runs.files import replacing
from tutti.train.learner import autocast, channels_last, put_channels_last

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
    _check_output(out, force, _split_name(inputs)[0])
    check_named(run)
    shape = (run.record.get("data") or {}).get("input_shape")
    with open_inputs(inputs, run.config, shape) as samples:
        model = _open_model(run, chosen)
        size = batch or run.config.batch.eval or _SAMPLES
        with replacing(out) as aside:
            is_large = shape is not None and _exceeds(samples.shape[2:], shape[1:])
            if shape is not None and is_large and run.config.framework == "torch" and _is_dense(model, shape):
                return _apply_fitting_tiles(samples, model, shape, tile, overlap, aside, report, say)
            if tile is not None or overlap is not None:
                raise ConfigError(
                    "--tile and --overlap are for models that give a value for each cell, and inputs larger than the "
                    f"{by(shape[1:]) if shape else 'samples'} of training: these are {by(samples.shape[2:])}. Leave "
                    "them out."
                )
            return _apply_batches(samples, size, model, aside, report)


def _apply_batches(samples: GivenInputs, size: int, model: AppliedModel, path: Path, report: Report) -> tuple[int, ...]:
    count, everywhere = samples.shape[0], tuple(slice(None) for _ in samples.shape[2:])
    with contextlib.ExitStack() as opened:
        write: Any = None
        shape: tuple[int, ...] = ()
        for start in range(0, count, size):
            found = model(torch.from_numpy(samples.read(slice(start, min(start + size, count)), everywhere)))
            if write is None:
                shape = (count, *found.shape[1:])
                write = opened.enter_context(_opened_output(path, shape, samples))
            write(slice(start, start + len(found)), (), found.numpy())
            report(min(start + size, count), count)
    return shape[1:] if samples.is_one else shape


def _apply_fitting_tiles(
    samples: GivenInputs,
    model: AppliedModel,
    shape: Sequence[int],
    tile: int | None,
    overlap: int | None,
    path: Path,
    report: Report,
    say: Callable[[str], None],
) -> tuple[int, ...]:
    """Apply a model in tiles; where they do not fit into memory as predicted, in smaller ones."""
    volume, tried = samples.shape[2:], ()
    most_cells = partial(find_most_cells, model, shape[0])
    while True:
        tiles = plan_tiles(model, shape, volume, tile, overlap, most_cells)
        say(tiles.note)
        try:
            return _apply_tiles(samples, tiles, model, path, report)
        except torch.OutOfMemoryError as error:
            if tile is not None or tiles.sizes == tried:
                reason = str(error).partition(". ")[0]
                fix = "a smaller --tile" if tile is not None else "an --overlap, for smaller tiles"
                raise ConfigError(
                    f"a tile of {by(tiles.sizes)} cells needs more memory than there is: {reason}. Set {fix}."
                ) from None
        say("out of memory: smaller tiles are tried")
        tried, half = tiles.sizes, math.prod(tiles.sizes) // 2
        most_cells = lambda sizes, half=half: half  # noqa: E731


def _apply_tiles(
    samples: GivenInputs, tiles: Tiles, model: AppliedModel, path: Path, report: Report
) -> tuple[int, ...]:
    """Compute tile by tile, while the next one is read and the one before is written."""
    volume = samples.shape[2:]
    work = list(itertools.product(range(samples.shape[0]), tiles.windows(volume)))
    transfer = Transfer(model.device)
    shape: tuple[int, ...] = ()

    def read(number: int) -> torch.Tensor | None:
        if number == len(work):
            return None
        sample, windows = work[number]
        place = tuple(slice(each.start, each.stop) for each in windows)
        return transfer.read(partial(samples.read, slice(sample, sample + 1)), place, samples.shape[1])

    with contextlib.ExitStack() as opened:
        write: Any = None
        writing: Any = None
        reading = opened.enter_context(ThreadPoolExecutor(1, "tutti-read"))
        ahead, behind = reading.submit(read, 0), None
        for number, (sample, windows) in enumerate(work):
            inputs = ahead.result()
            assert inputs is not None
            ahead = reading.submit(read, number + 1)
            found = model.compute(transfer.received(inputs))
            if write is None:
                shape = (samples.shape[0], found.shape[1], *volume)
                write = opened.enter_context(_opened_output(path, shape, samples))
                writing = opened.enter_context(ThreadPoolExecutor(1, "tutti-write"))  # ends before the file is closed
            kept = found[(..., *(slice(each.first - each.start, each.end - each.start) for each in windows))]
            if behind is not None:
                behind.result()
                report(number, len(work))
            place = tuple(slice(each.first, each.end) for each in windows)
            to = partial(write, slice(sample, sample + 1))
            behind = writing.submit(transfer.write, kept, to, place, transfer.mark())
            del inputs, found, kept
        if behind is not None:
            behind.result()
        report(len(work), len(work))
    return shape[1:] if samples.is_one else shape


def _is_dense(model: AppliedModel, shape: Sequence[int]) -> bool:
    """Whether a model gives values for each cell of its input."""
    found = model(torch.zeros(1, *shape))
    return found.ndim == len(shape) + 1 and tuple(found.shape[2:]) == tuple(shape[1:])


def _open_model(run: OpenedRun, chosen: ChosenCheckpoint) -> AppliedModel:
    """The model of a checkpoint, which fails with a sentence on what it cannot take."""
    name, trained = run.config.model.name, (run.record.get("data") or {}).get("input_shape")
    model = _in_torch(run, chosen) if run.config.framework == "torch" else _in_keras(run, chosen)

    def compute(batch: torch.Tensor) -> torch.Tensor:
        try:
            found = model.compute(batch)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0].rstrip(".")
            raise DataError(
                f"{name} fails for inputs of the shape {list(batch.shape)} and the type "
                f"{str(batch.dtype).removeprefix('torch.')}: {type(error).__name__}: {reason}. Give inputs as in "
                f"training{f', of the shape {trained}' if trained else ''}; numbers that are not floating-point "
                "numbers stay integers."
            ) from error
        if not isinstance(found, torch.Tensor) or not found.ndim or len(found) != len(batch):
            raise DataError(f"{name} gives a {type(found).__name__}: expected a tensor with a row a sample.")
        return found

    return AppliedModel(model.device, compute, model.predict_memory)


def _in_torch(run: OpenedRun, chosen: ChosenCheckpoint) -> AppliedModel:
    config = run.config
    device = torch.device("cuda" if uses_gpus(config.runtime) else "cpu")
    lays_out = applies(config.speed.channels_last, device)
    model = run.model(chosen.manifest.step, ema=chosen.ema).to(device)
    if lays_out:
        put_channels_last(model)

    @torch.no_grad()
    def compute(batch: torch.Tensor) -> Any:
        with autocast(config.precision, device):
            given = batch.to(device)
            return model(channels_last(given) if lays_out else given)

    def predict_memory(shape: Sequence[int]) -> PassMemory:
        make_model = partial(build_model, config, run.record)
        return predict_pass(make_model, shape, config.precision, device.type, lays_out)

    return AppliedModel(device, compute, predict_memory)


def _in_keras(run: OpenedRun, chosen: ChosenCheckpoint) -> AppliedModel:
    model = run.model(chosen.manifest.step)
    import keras

    from tutti.frameworks.feed import as_arrays

    def compute(batch: torch.Tensor) -> Any:
        inputs, _ = as_arrays((batch, batch))
        found = model(inputs, training=False)
        if not keras.ops.is_tensor(found):
            return found
        return torch.from_numpy(np.array(keras.ops.convert_to_numpy(found), np.float32))  # also of bfloat16

    return AppliedModel(torch.device("cpu"), compute)


@contextlib.contextmanager
def open_inputs(given: str, config: RunConfig, shape: Sequence[int] | None) -> Iterator[GivenInputs]:
    """The inputs that are meant by a file of NumPy, FILE:DATASET of HDF5, an image, or a folder of images."""
    path, name = _split_name(given)
    if not path.exists():
        raise DataError(f"{given}: no such file. Give a .npy file, FILE.h5:DATASET, an image or a folder of images.")
    if path.is_dir() or path.suffix.lower() in IMAGES:
        yield _images(path, config, shape)
    elif path.suffix.lower() == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
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


def _split_name(given: str) -> tuple[Path, str]:
    """The file or folder that is given, and the name of a dataset in it."""
    path, _, name = given.rpartition(":")
    return (Path(path), name) if path and not Path(given).exists() else (Path(given), "")


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
        kind = np.float32 if array.dtype.kind == "f" else np.int64
        return chosen.astype(kind, copy=isinstance(array, np.ndarray))  # a dataset of HDF5 gives a copy

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


def _check_output(path: Path, force: bool, source: Path) -> None:
    if path.suffix.lower() not in OUTPUTS:
        raise ConfigError(f"--out {path}: expected a file that ends in {', '.join(OUTPUTS)}.")
    if path.exists() and source.exists() and path.samefile(source):
        raise FolderError(f"--out {path} holds the inputs: expected another file. Name another with --out.")
    if path.exists() and not force:
        raise FolderError(f"{path} exists: expected a new file. Name another with --out, or replace it with --force.")
    if not path.parent.is_dir():
        raise FolderError(f"--out {path}: there is no folder {path.parent}. Create it, or choose another.")


@contextlib.contextmanager
def _opened_output(path: Path, shape: tuple[int, ...], samples: GivenInputs) -> Iterator[Callable[..., None]]:
    """A function that writes values of some samples at a place in space; what is written need not fit into memory."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        if len(shape) != 2:
            name = path.name.split(".", 2)[2]  # the file is written aside
            raise ConfigError(f"--out {name}: outputs of the shape {list(shape[1:])} are no rows of a table. Use .npy.")
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
        if suffix == ".npy":
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
        if suffix == ".npy":
            array.flush()


def _exceeds(sides: Sequence[int], crop: Sequence[int]) -> bool:
    return len(sides) == len(crop) and any(side > each for side, each in zip(sides, crop, strict=True))
