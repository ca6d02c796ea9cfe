"""ImageNet and similar datasets: one folder of encoded images per class, decoded and cropped by loader workers."""

import io
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tutti.errors import ConfigError, DataError, nearest

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the image
Span = tuple[int, int]  # first output pixel, and the one after the last
_TRIES = 10


@dataclass(frozen=True)
class View:
    """A region of an image and the output pixels that it fills; the other output pixels repeat its edges."""

    box: Box
    columns: Span
    rows: Span
    flip: bool = False


Choose = Callable[[int, int, int], View]  # from the width and height of an image and the output size


def centre_view(width: int, height: int, size: int, share: float) -> View:
    """Centre crop: a square whose side is `share` of the shorter side of the image."""
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return View((left, top, left + side, top + side), (0, size), (0, size))


def crop_view(
    width: int, height: int, size: int, scale: tuple[float, float], ratio: tuple[float, float], flip: bool
) -> View:
    """Random resized crop: area share in `scale`, width over height in `ratio`, with a random horizontal flip."""
    box = _random_box(width, height, scale, ratio)
    return View(box, (0, size), (0, size), flip and random.random() < 0.5)


def shift_view(width: int, height: int, size: int, shift: float, zoom: float, flip: bool) -> View:
    """The whole image with a random shift and zoom in each direction and a random horizontal flip."""
    left, right, columns = _random_range(width, size, shift, zoom)
    top, bottom, rows = _random_range(height, size, shift, zoom)
    return View((left, top, right, bottom), columns, rows, flip and random.random() < 0.5)


def decode_view(content: bytes, size: int, choose: Choose) -> np.ndarray:
    """Decodes the chosen region of an image and resizes it to size x size x 3 bytes."""
    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
        view = choose(width, height, size)
        left, top, right, bottom = view.box
        (first_column, end_column), (first_row, end_row) = view.columns, view.rows
        columns, rows = end_column - first_column, end_row - first_row
        # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that still has enough pixels for the output.
        wanted = math.ceil(width * columns / (right - left)), math.ceil(height * rows / (bottom - top))
        drafted = image.draft("RGB", wanted)
        shrink = drafted[1][2] / width if drafted else 1.0  # the size itself is rounded up to whole pixels
        box = left * shrink, top * shrink, min(right * shrink, image.width), min(bottom * shrink, image.height)
        pixels = np.asarray(_as_rgb(image).resize((columns, rows), Image.Resampling.BILINEAR, box, reducing_gap=2.0))
    if (columns, rows) != (size, size):
        pixels = np.pad(pixels, ((first_row, size - end_row), (first_column, size - end_column), (0, 0)), "edge")
    return pixels[:, ::-1] if view.flip else pixels


def _random_box(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """Returns a random box inside the image; if none fits, the largest centred one within the ratio."""
    for _ in range(_TRIES):
        area = width * height * random.uniform(*scale)
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    wide, high = min(width, height * ratio[1]), min(height, width / ratio[0])
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def _random_range(length: int, size: int, shift: float, zoom: float) -> tuple[float, float, Span]:
    """Along one axis: the range of the image that is visible, and the output pixels that show it."""
    step = random.uniform(1 - zoom, 1 + zoom) * length / size  # image pixels per output pixel
    start = (length - step * size) / 2 + random.uniform(-shift, shift) * length
    first = min(max(math.ceil(-start / step), 0), size - 1)
    end = max(min(math.floor((length - start) / step), size), first + 1)
    low = min(max(start + first * step, 0.0), length - min(step, length))
    return low, min(low + (end - first) * step, float(length)), (first, end)


def _as_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to RGB without transparency."""
    if image.mode == "P":
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, scaled to 0..1
SPLITS = {"train": ("train",), "valid": ("validation", "val", "valid", "test")}
AUGMENTS = ("crop", "shift_zoom", "none")
POLICIES = ("refuse", "skip")
_SUFFIXES = (".jpg", ".jpeg", ".png")
_MAKE = "Or make generated images to try with: tutti data make images --out"


def image_tree(
    split: str,
    path: str = "data/imagenet",
    size: int = 224,
    augment: str = "crop",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (0.75, 1.3333),
    shift: float = 0.33,
    zoom: float = 0.5,
    flip: bool = True,
    centre: float = 0.875,
    classes: int | None = None,
    corrupt: str = "refuse",
) -> "ImageTree":
    """Returns the images in `train/CLASS/` or `validation/CLASS/`; `classes` limits them to the first by name."""
    _check_options(split, size, augment, scale, ratio, shift, zoom, centre, corrupt)
    if split == "valid" or augment == "none":
        choose: Choose = partial(centre_view, share=centre)
    elif augment == "crop":
        choose = partial(crop_view, scale=(scale[0], scale[1]), ratio=(ratio[0], ratio[1]), flip=flip)
    else:
        choose = partial(shift_view, shift=shift, zoom=zoom, flip=flip)
    root = Path(path)
    try:
        files = ImageFiles(root, split, class_names(root, classes))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}. Check its permissions.") from error
    return ImageTree(files, size, choose, corrupt == "skip", replaces=split == "train")


class ImageTree:
    """Map-style dataset of image files; pixels are bytes until `finish` normalises a batch on the device."""

    def __init__(self, files: "ImageFiles", size: int, choose: Choose, skips: bool, replaces: bool) -> None:
        self._files = files
        self._size = size
        self._choose = choose
        self._replaces = replaces
        self.input_shape = (3, size, size)
        self.num_classes = len(files.classes)
        # Corrupt files that were skipped and not yet reported; None if corrupt files are errors.
        self.skipped: list[str] | None = [] if skips else None

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int] | None:
        """Returns an image and its class; a skipped one is replaced by the next of its class, in validation by None."""
        label = self._files.label(index)
        for other in self._files.rest_of_class(index) if self._replaces else [index]:
            path = self._files.path(other)
            try:
                return self._read(path), label
            except CorruptImage:
                if self.skipped is None:
                    raise
                self.skipped.append(path)
        if self._replaces:
            raise DataError(
                f"none of the images in {os.path.dirname(self._files.path(index))} can be decoded: expected at least "
                "one. Replace them, or remove the class."
            )
        return None

    def finish(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalises bytes with ImageNet's mean and standard deviation."""
        scale, offset = _normalisation(inputs.device)
        return (inputs * scale).add_(offset)

    def _read(self, path: str) -> torch.Tensor:
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}. Check that it is there and readable.") from error
        try:
            pixels = decode_view(content, self._size, self._choose)
        except MemoryError:
            raise
        except Exception as error:  # decoders raise almost anything on bytes that are wrong
            raise CorruptImage(
                f"{path} cannot be decoded as an image ({_reason(error, content)}). Replace or remove it, or skip "
                "such images with data.corrupt=skip."
            ) from error
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


class CorruptImage(DataError):
    """A file that can be read but not decoded as an image."""


class ImageFiles:
    """The image files of a split, sorted by class and name, in compact memory: ImageNet has 1.28 million."""

    def __init__(self, root: Path, split: str, classes: list[str]) -> None:
        self.classes = classes
        self._folder = _split_folder(root, split)
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

    def rest_of_class(self, index: int) -> Iterator[int]:
        """Yields an index, then the other indices of its class in cyclic order."""
        first, end = map(int, self._starts[self.label(index) : self.label(index) + 2])
        yield from range(index, end)
        yield from range(first, index)


def class_names(root: Path, count: int | None = None) -> list[str]:
    """Returns the sorted folder names of the training split; only the first `count` if given."""
    folder = _split_folder(root, "train")
    names = _folders(folder)
    if not names:
        raise DataError(f"{folder} holds no folders: expected one for each class, with images. {_MAKE} FOLDER.")
    if count is not None and not 1 <= count <= len(names):
        raise DataError(
            f"data.classes={count}, but {folder} holds {len(names)} classes: expected 1 to {len(names)}. "
            "Leave data.classes out to use all."
        )
    return names[:count]


def _split_folder(root: Path, split: str) -> Path:
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
                f"{folder / name} is a class that {_split_folder(root, 'train')} does not have.{nearest(name, known)} "
                "Expected the same classes in both: rename or remove it."
            )
        if name in chosen:
            with os.scandir(folder / name) as entries:
                files = [entry.name for entry in entries if entry.name.lower().endswith(_SUFFIXES)]
            found[name] = sorted(file for file in files if not file.startswith("."))
            if not found[name]:
                raise DataError(
                    f"{folder / name} holds no images: expected files that end in {', '.join(_SUFFIXES)}. "
                    "Fill the folder, or remove it."
                )
    if not found:
        raise DataError(f"{folder} holds none of the classes of the run: expected folders such as {classes[0]}/.")
    return found


def _check_options(
    split: str,
    size: int,
    augment: str,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    shift: float,
    zoom: float,
    centre: float,
    corrupt: str,
) -> None:
    for key, given, choices in (
        ("split", split, SPLITS),
        ("augment", augment, AUGMENTS),
        ("corrupt", corrupt, POLICIES),
    ):
        if given not in choices:
            raise ConfigError(f"data.{key}={given!r}: expected one of {', '.join(choices)}.{nearest(given, choices)}")
    for key, given, fits, expected in (
        ("size", size, size >= 1, "at least 1 pixel"),
        ("scale", scale, 0 < scale[0] <= scale[1] <= 1, "two shares of the area, 0 < low <= high <= 1"),
        ("ratio", ratio, 0 < ratio[0] <= ratio[1], "two ratios of width to height, 0 < low <= high"),
        ("shift", shift, 0 <= shift < 1, "a share of the height and width from 0 to below 1"),
        ("zoom", zoom, 0 <= zoom < 1, "a share from 0 to below 1"),
        ("centre", centre, 0 < centre <= 1, "a share of the shorter side, above 0 and at most 1"),
    ):
        if not fits:
            raise ConfigError(f"data.{key}={given}: expected {expected}.")


@cache
def _normalisation(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scale and offset of each channel, copied to a device once."""
    with torch.inference_mode(False):
        mean, std = (torch.tensor(values, dtype=torch.float64).reshape(3, 1, 1) for values in (MEAN, STD))
        return (1 / (255 * std)).to(device, torch.float32), (-mean / std).to(device, torch.float32)


def _reason(error: Exception, content: bytes) -> str:
    if not content:
        return "it is empty"
    if "cannot identify image" in str(error):  # Pillow's message has only the address of a buffer
        return f"it begins with {content[:4].hex(' ')}"
    return str(error) or type(error).__name__
