"""Generated images in the folder layout of ImageNet, with classes that a network can learn."""

import colorsys
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image

from tutti.data.processes import in_order
from tutti.errors import DataError

Report = Callable[[str, int, int], None]  # split, images so far, images in all
MARK = "made_images.json"  # marks a folder that may be replaced, and holds its options
_QUALITY = 90
_SMALLEST, _LARGEST = 16, 4096  # pixels of a side
_CHUNK = 4  # images in a task of a worker


def make_images(
    out: Path,
    classes: int = 10,
    train: int = 32,
    valid: int = 8,
    size: int = 256,
    seed: int = 0,
    report: Report = lambda *_: None,
    workers: int = 1,
) -> Path:
    """Writes `train` and `valid` JPEG images of each class; the same seed gives the same images on any workers."""
    options = {"classes": classes, "train": train, "valid": valid, "size": size, "seed": seed}
    _check(options)
    folder = out.resolve()  # a symbolic link is kept
    _check_free(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for split, (name, samples) in enumerate((("train", train), ("validation", valid))):
            _write_split(temporary / name, (seed, split), classes, samples, size, report, workers)
        (temporary / MARK).write_text(json.dumps(options) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}. Choose another folder with --out.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def draw_image(label: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Draws a striped disc on a striped background; hue, direction and width of the stripes depend on the class."""
    high, wide = (int(size * stretch) for stretch in generator.uniform(0.8, 1.25, 2))
    rows, columns = np.mgrid[0:high, 0:wide].astype(np.float32) / size
    # Multiples of irrational numbers modulo 1 keep any number of classes apart.
    hue, slope, pitch = (label * step % 1 for step in (0.6180, 0.7549, 0.5698))
    angle = np.pi / 2 * slope + generator.normal(0, 0.05)  # within 90 degrees: a flipped image keeps its class
    stripes = np.sin(
        2 * np.pi * (4 + 12 * pitch) * generator.uniform(0.9, 1.1) * (columns * np.cos(angle) + rows * np.sin(angle))
        + generator.uniform(0, 2 * np.pi)
    )
    top, left = generator.uniform(0.3, 0.7, 2)
    radius = generator.uniform(0.2, 0.4)
    inside = (np.hypot(rows - top * high / size, columns - left * wide / size) < radius)[..., None]
    disc, ground = _colour(hue, 0.9, generator), _colour(hue + 0.35, 0.5, generator)
    light = (0.65 + 0.35 * stripes)[..., None]
    picture = np.where(inside, disc * light, ground * (1.3 - light)) + generator.normal(0, 0.05, (high, wide, 3))
    return (picture.clip(0, 1) * 255).astype(np.uint8)


def _colour(hue: float, value: float, generator: np.random.Generator) -> np.ndarray:
    hue, saturation, value = (
        hue + generator.normal(0, 0.02),
        generator.uniform(0.6, 0.9),
        value * generator.uniform(0.8, 1),
    )
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value), np.float32)


def _write_split(
    folder: Path, seeds: tuple[int, int], classes: int, samples: int, size: int, report: Report, workers: int
) -> None:
    for label in range(classes):
        _class_folder(folder, label).mkdir(parents=True)
    total = classes * samples
    chunks = [
        [divmod(number, samples) for number in range(start, min(start + _CHUNK, total))]
        for start in range(0, total, _CHUNK)
    ]
    done = 0
    with closing(in_order(_write_images, (folder, seeds, size), chunks, min(workers, len(chunks)))) as written:
        for count in written:
            for _ in range(count):
                done += 1
                report(folder.name, done, total)


def _write_images(split: tuple[Path, tuple[int, int], int], chosen: list[tuple[int, int]]) -> int:
    """Draws and writes some images by label and number; returns how many."""
    folder, seeds, size = split
    for label, sample in chosen:
        generator = np.random.Generator(np.random.PCG64([*seeds, label, sample]))
        picture = Image.fromarray(draw_image(label, size, generator))
        picture.save(_class_folder(folder, label) / f"{sample:04d}.jpg", quality=_QUALITY)
    return len(chosen)


def _class_folder(folder: Path, label: int) -> Path:
    return folder / f"class_{label:03d}"


def _check(options: dict[str, int]) -> None:
    for name, given in options.items():
        least = {"size": _SMALLEST, "seed": 0}.get(name, 1)
        if given < least:
            raise DataError(f"--{name} {given}: expected at least {least}.")
    if options["size"] > _LARGEST:  # an image takes 100 bytes a pixel while it is drawn
        raise DataError(f"--size {options['size']}: expected at most {_LARGEST:,}.")


def _check_free(folder: Path) -> None:
    """Raises DataError unless the folder is new, empty or was written by this function."""
    if folder.is_dir():
        if not any(folder.iterdir()) or (folder / MARK).is_file():
            return
        raise DataError(
            f"{folder} is not empty and was not made by this command: expected a new or an empty folder. "
            "Choose another with --out, or empty it first."
        )
    if folder.exists():
        raise DataError(f"{folder} is a file: expected a folder. Choose another with --out.")
