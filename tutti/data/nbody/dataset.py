"""Crops of simulation boxes as a dataset: inputs from the N-body fields, targets from the hydro fields."""

import copy
import os
from pathlib import Path

import numpy as np
import torch

from tutti.data.dataset import Part
from tutti.data.nbody.box import CHANNELS, BoxFile, open_box, read_field
from tutti.data.nbody.device_source import DeviceSource
from tutti.data.nbody.make import make_nbody
from tutti.data.nbody.sources import IDENTITY, Choices, HostSource, InMemory, Source, read_disk
from tutti.data.order import Draws
from tutti.errors import DataError
from tutti.ranks.device import DTYPES

_SYMMETRIES = 48
_VALIDATION_SEED = 2106_12662  # validation crops are the same in every run
GPU_SHARE = HOST_SHARE = 0.4  # of free memory for a box; the rest is for the model and its batches


class NbodyCrops:
    """Random crops of a box with random symmetries of the cube; validation crops are fixed and have none."""

    num_classes = None

    def __init__(
        self,
        source: Source,
        side: int,
        crop: int,
        samples: int,
        symmetries: bool,
        vectors: bool,
        note: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._source, self._side, self._crop, self._samples = source, side, crop, samples
        self._symmetries, self._vectors = symmetries, vectors
        self._dtype = dtype  # of the inputs
        self.note = note  # which source is used, and why
        self.part: Part | None = None
        self.input_shape = (CHANNELS["Nbody"], crop, crop, crop)

    def __len__(self) -> int:
        return self._samples

    def for_part(self, part: Part) -> "NbodyCrops":
        """The same crops, of which one part is read."""
        found = copy.copy(self)
        found.part = part
        return found

    def batch(self, ids: torch.Tensor, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
        places = draws or Draws(_VALIDATION_SEED, 0, ids)
        corners = torch.stack([places.integers(0, self._side - self._crop) for _ in range(3)], 1)
        symmetries = torch.full_like(ids, IDENTITY)
        if draws is not None and self._symmetries:
            symmetries = draws.integers(0, _SYMMETRIES - 1)
        choices = Choices(corners.numpy(), symmetries.numpy(), self._vectors, self.part)
        inputs, targets = self._source.crops(choices)
        return inputs.to(self._dtype), targets


def nbody(
    split: str,
    train: str = "data/nbody/train.h5",
    valid: str = "data/nbody/valid.h5",
    source: str = "auto",
    crop: int = 64,
    train_samples: int = 65536,
    valid_samples: int = 8192,
    symmetries: bool = True,
    vectors: bool = True,
    box: int = 128,
    make: bool = False,
    rounded: bool = True,
    device: torch.device | None = None,
    local_ranks: int = 1,
    precision: str = "fp32",
) -> NbodyCrops:
    """Returns crops of the training or validation box; `box` and `make` apply when a file is missing.

    With `rounded`, inputs have the numbers of the run's precision, to which the first layer would round them.
    """
    device = device or torch.device("cpu")
    dtype = DTYPES[precision] if rounded else torch.float32
    is_train = split == "train"
    samples = train_samples if is_train else valid_samples
    if source == "synthetic":
        opened, side, note = _random_fields(max(box, crop), seed=1 if is_train else 2), max(box, crop), "random numbers"
        made: Source = HostSource(InMemory(opened), crop, device, torch.get_num_threads())
    else:
        file = open_box(Path(train if is_train else valid), crop)
        kind, why = choose_source(source, file, device, local_ranks)
        side, note = file.side, f"{file.path} ({file.side}^3), source {kind}: {why}"
        made = _open_source(kind, file, crop, device, dtype)
    return NbodyCrops(made, side, crop, samples, symmetries and is_train, vectors, note, dtype)


def make_missing(train: str, valid: str, box: int) -> None:
    """Makes the boxes whose files are missing, with different seeds."""
    for seed, path in enumerate((Path(train), Path(valid)), start=1):
        if not path.exists():
            print(f"{path} does not exist: making a box of {box}^3 cells", flush=True)
            make_nbody(path, box=box, seed=seed)


def choose_source(requested: str, file: BoxFile, device: torch.device, local_ranks: int) -> tuple[str, str]:
    """Returns where the box is kept and why: on the GPU if it fits, else in memory if it fits, else on disk."""
    if requested != "auto":
        return requested, "as the recipe says"
    size = file.bytes / 2**30
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] / 2**30
        if size <= GPU_SHARE * free:
            return "device", f"{size:.1f} GiB fit on the GPU, which has {free:.1f} GiB free"
    free = _free_memory_gib() / local_ranks
    if size <= HOST_SHARE * free:
        return "memory", f"{size:.1f} GiB fit in memory, of which each rank has {free:.1f} GiB free"
    return "disk", f"{size:.1f} GiB are too much for the {free:.1f} GiB of free memory of each rank"


def _open_source(kind: str, file: BoxFile, crop: int, device: torch.device, dtype: torch.dtype) -> Source:
    threads = torch.get_num_threads()
    in_memory = file.bytes if kind == "memory" else file.bytes * max(CHANNELS.values()) // sum(CHANNELS.values())
    if kind != "disk" and in_memory / 2**30 > (free := _free_memory_gib()):
        raise DataError(
            f"{file.path} is a box of {file.side}^3 cells, of which data.source={kind} keeps {in_memory / 2**30:,.1f} "
            f"GiB in memory: expected at most the {free:.1f} GiB that are free. Set data.source=disk."
        )
    if kind == "disk":
        return HostSource(read_disk(file), crop, device, threads)
    fields = ((name, read_field(file, name)) for name in CHANNELS)
    if kind == "device":
        return DeviceSource(fields, crop, device, dtype)
    return HostSource(InMemory(dict(fields)), crop, device, threads)


def _random_fields(side: int, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    shapes = {name: (channels, side, side, side) for name, channels in CHANNELS.items()}
    return {name: generator.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def _free_memory_gib() -> float:
    """Returns the memory available to new processes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**31  # half of all
