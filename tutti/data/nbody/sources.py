"""Crops from a box in memory or on disk, with bitwise equal results, and what a crop is."""

import math
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, Protocol

import h5py
import numpy as np
import torch

from tutti.data.dataset import Part
from tutti.data.nbody.box import CHANNELS, SCALARS, BoxFile, check_finite, reading

# One row per symmetry: the source axis of each result axis, and whether that axis is reversed.
AXES = np.array([axes for axes in permutations(range(3)) for _ in range(8)])
FLIPS = np.array([flips for _ in permutations(range(3)) for flips in product((False, True), repeat=3)])
IDENTITY = 0


def transformed(field: np.ndarray, symmetry: int) -> np.ndarray:
    """Returns a view of a field (space is the last three axes) under a symmetry."""
    axes, flips = AXES[symmetry], FLIPS[symmetry]
    before = tuple(range(field.ndim - 3))
    turned = field.transpose(*before, *(len(before) + axis for axis in axes))
    return turned[(..., *(slice(None, None, -1) if flip else slice(None) for flip in flips))]


def channel_sources(scalars: int, symmetry: int, vectors: bool) -> list[tuple[int, int]]:
    """Returns the source channel and sign of every result channel: scalars first, then the components of a vector.

    The components of a vector are permuted and negated with the axes. With `vectors=False` they are left unchanged,
    as in the tutorials.
    """
    kept = [(channel, 1) for channel in range(scalars)]
    if not vectors:
        return kept + [(scalars + axis, 1) for axis in range(3)]
    return kept + [
        (scalars + int(axis), -1 if flip else 1) for axis, flip in zip(AXES[symmetry], FLIPS[symmetry], strict=True)
    ]


@dataclass(frozen=True)
class Choices:
    """The first cell and the symmetry of each crop of a batch, and which part of the crops is wanted."""

    corners: np.ndarray  # samples x 3
    symmetries: np.ndarray  # samples
    vectors: bool = True
    part: Part | None = None

    def __len__(self) -> int:
        return len(self.symmetries)

    def window(self, crop: int) -> list[tuple[int, int]]:
        """The first cell and the number of cells of the wanted part, along the axes of a crop under its symmetry."""
        return [(0, crop)] * 3 if self.part is None else self.part.window([crop] * 3)

    def block(self, sample: int, crop: int) -> tuple[np.ndarray, list[int]]:
        """Where the wanted part of a crop is in the box: its first cell, and its cells along each axis."""
        corner, sizes, symmetry = self.corners[sample].copy(), [crop] * 3, int(self.symmetries[sample])
        for (start, size), axis, flip in zip(self.window(crop), AXES[symmetry], FLIPS[symmetry], strict=True):
            corner[axis] += crop - start - size if flip else start
            sizes[axis] = size
        return corner, sizes


class Source(Protocol):
    """Returns the crops of a batch: inputs and targets, samples x channels x crop^3."""

    def crops(self, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]: ...


Read = Callable[[str, np.ndarray, np.ndarray], None]  # field, corner, output array with all channels


class HostSource:
    """Crops copied on the CPU by the threads of the rank, into one tensor for the batch.

    For a GPU the tensor is one of two pinned buffers, so that the copy to the GPU overlaps with the step.
    """

    def __init__(self, read: Read, crop: int, device: torch.device, threads: int) -> None:
        self._read, self._crop, self._device = read, crop, device
        self._pool = ThreadPoolExecutor(threads, "crops") if threads > 1 else None
        self._local = threading.local()
        self._tensor_pool = _TensorPool()
        self._pinned: list[_Pinned] = []
        self._turn = 0

    def crops(self, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
        if self._device.type != "cuda":
            inputs, targets = (self._tensor_pool.take(shape) for shape in self._shapes(choices))
            self._fill(choices, inputs, targets)
            return inputs, targets
        slot = self._next_slot(self._shapes(choices))
        slot.wait()
        self._fill(choices, *slot.tensors)
        return slot.send(self._device)

    def _shapes(self, choices: Choices) -> list[tuple[int, ...]]:
        sizes = [size for _, size in choices.window(self._crop)]
        return [(len(choices), channels, *sizes) for channels in CHANNELS.values()]

    def _next_slot(self, shapes: list[tuple[int, ...]]) -> "_Pinned":
        if not self._pinned or self._pinned[0].tensors[0].shape != shapes[0]:
            pairs = ([torch.empty(shape, pin_memory=True) for shape in shapes] for _ in range(2))
            self._pinned = [_Pinned(tensors) for tensors in pairs]
        self._turn = 1 - self._turn
        return self._pinned[self._turn]

    def _fill(self, choices: Choices, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        arrays = {"Nbody": inputs.numpy(), "Hydro": targets.numpy()}

        def cut(place: tuple[int, str]) -> None:
            sample, name = place
            self._cut(name, choices, sample, arrays[name][sample])

        places = list(product(range(len(choices)), arrays))
        list(self._pool.map(cut, places) if self._pool is not None else map(cut, places))

    def _cut(self, name: str, choices: Choices, sample: int, out: np.ndarray) -> None:
        """Copies one crop of a field through a block that fits in the cache, and applies the symmetry from there.

        A crop from memory is copied channel by channel through the first cube of the block, which needs less cache.
        """
        symmetry, (corner, sizes) = int(choices.symmetries[sample]), choices.block(sample, self._crop)
        block = self._block(sizes)[: len(out)]
        window = self._read.window(name, corner, sizes) if isinstance(self._read, InMemory) else None
        if window is None:
            self._read(name, corner, block)
        turned = transformed(block, symmetry)
        for channel, (source, sign) in enumerate(channel_sources(SCALARS[name], symmetry, choices.vectors)):
            if window is not None:
                np.copyto(block[0], window[source])
                source = 0
            (np.copyto if sign > 0 else _negate)(out[channel], turned[source])

    def _block(self, sizes: list[int]) -> np.ndarray:
        """Returns the block of this thread; rows are padded, because strides of powers of two conflict in caches."""
        shape = max(CHANNELS.values()), sizes[0], sizes[1] + 2, sizes[2] + 8
        needed = math.prod(shape)
        if not hasattr(self._local, "memory") or self._local.memory.size < needed:
            self._local.memory = np.empty(needed, np.float32)
        return self._local.memory[:needed].reshape(shape)[:, :, : sizes[1], : sizes[2]]


def _negate(out: np.ndarray, values: np.ndarray) -> None:
    np.negative(values, out=out)


class _TensorPool:
    """A pool of tensors whose memory is reused when no view of them is left.

    Page faults of newly allocated large tensors take longer than copying a crop.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[np.ndarray]] = {}

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        free = self._free.setdefault(shape, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = _large_pages(shape)
        held = memory.view()  # referenced by the tensor and all its views; collected with the last of them
        weakref.finalize(held, free.append, memory).atexit = False
        return torch.from_numpy(held)


def _large_pages(shape: tuple[int, ...]) -> np.ndarray:
    """Returns memory with torch's alignment from NumPy, which requests huge pages."""
    size = math.prod(shape)
    memory = np.empty(size + 16, np.float32)
    begin = -memory.ctypes.data % 64 // 4
    return memory[begin : begin + size].reshape(shape)


class _Pinned:
    """Pinned tensors, and the event of their last copy to a GPU."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._sent: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Waits until the last copy to the GPU is complete."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in self.tensors)
        self._sent = torch.cuda.Event()
        self._sent.record()
        return inputs, targets


class InMemory:
    """Crops of whole fields in memory."""

    def __init__(self, fields: dict[str, np.ndarray]) -> None:
        self._fields = fields

    def __call__(self, name: str, corner: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, self.window(name, corner, out.shape[1:]))

    def window(self, name: str, corner: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Returns a view of a crop."""
        return self._fields[name][_window(corner, sizes)]


def read_disk(box: BoxFile) -> Read:
    """Returns a reader of crops from a file: memory-mapped if its chunks are plain float32, else through HDF5."""
    with reading(box.path, "what it holds"), h5py.File(box.path, "r") as file:
        maps = {name: _map_chunks(file, name) for name in CHANNELS}
    library = _library(box) if None in maps.values() else None

    def read(name: str, corner: np.ndarray, out: np.ndarray) -> None:
        pieces = maps[name]
        if pieces is not None:
            pieces.read(corner, out)
        elif library is not None:
            library(name, corner, out)
        if not np.isfinite(out).all():
            for channel, values in enumerate(out):
                check_finite(values, box.path, name, channel, tuple(int(start) for start in corner))

    return read


class _MappedChunks:
    """The chunks of a dataset in a memory-mapped file.

    Chunks at equal distances are copied in one call: NumPy holds the GIL between copies and releases it during them.
    """

    def __init__(self, content: mmap.mmap, offsets: np.ndarray, chunk: tuple[int, ...]) -> None:
        self._content, self._offsets, self._chunk = content, offsets, chunk
        gaps = [np.diff(offsets, axis=axis) for axis in (1, 2, 3)]
        steps = [int(np.median(gap)) if gap.size else 0 for gap in gaps]
        self._uneven = [gap != step for gap, step in zip(gaps, steps, strict=True)]
        self._strides = *steps, *(4 * math.prod(chunk[axis:]) for axis in (1, 2, 3)), 4

    def read(self, corner: np.ndarray, out: np.ndarray) -> None:
        """Reads a crop with all its channels."""
        channels, *sizes = self._chunk
        ranges = [(int(start), cells, size) for start, cells, size in zip(corner, out.shape[1:], sizes, strict=True)]
        together = self._even(
            [slice(start // size, (start + length - 1) // size + 1) for start, length, size in ranges]
        )
        spans = [_spans(*along, together) for along in ranges]
        for layer, offsets in enumerate(self._offsets):
            into = out[layer * channels : (layer + 1) * channels]
            for (i, num_i, from_i, to_i), (j, num_j, from_j, to_j), (k, num_k, from_k, to_k) in product(*spans):
                shape = num_i, num_j, num_k, *self._chunk
                pieces = np.ndarray(shape, np.float32, self._content, offsets[i, j, k], self._strides)
                pieces = pieces[:, :, :, : len(into), from_i, from_j, from_k].transpose(3, 0, 4, 1, 5, 2, 6)
                into[:, to_i, to_j, to_k].reshape(pieces.shape)[...] = pieces  # splitting axes is always a view

    def _even(self, chunks: list[slice]) -> bool:
        """Returns whether chunks are at equal distances in a part of the dataset."""
        for axis, uneven in enumerate(self._uneven):
            inner = [slice(c.start, c.stop - 1) if place == axis else c for place, c in enumerate(chunks)]
            if uneven[:, *inner].any():
                return False
        return True


def _spans(start: int, length: int, size: int, together: bool) -> list[tuple[int, int, slice, slice]]:
    """Returns for a range of cells: first chunk, number of chunks, part of each chunk, and part of the output."""
    found, place, end = [], start, start + length
    while place < end:
        number, low = divmod(place, size)
        high = min(size, low + end - place)
        count = max(1, (end - place) // size) if together and low == 0 else 1
        stop = place + count * (high - low)
        found.append((number, count, slice(low, high), slice(place - start, stop - start)))
        place = stop
    return found


def _map_chunks(file: h5py.File, name: str) -> _MappedChunks | None:
    """Maps the chunks of a dataset; None if they are compressed, missing or not float32."""
    field: Any = file[name]
    plain = field.dtype == np.float32 and not field.id.get_create_plist().get_nfilters()
    if not plain or field.is_virtual or field.external:
        return None
    if field.chunks is None:
        chunk, offsets = field.shape, np.full((1, 1, 1, 1), -1, np.int64)
        if (begin := field.id.get_offset()) is None:
            return None
        offsets[0, 0, 0, 0] = begin
    else:
        chunk = field.chunks
        counts = tuple(-(-size // step) for size, step in zip(field.shape, chunk, strict=True))
        offsets = np.full(counts, -1, np.int64)

        def note(info: Any) -> None:
            place = tuple(start // step for start, step in zip(info.chunk_offset, chunk, strict=True))
            offsets[place] = info.byte_offset

        field.id.chunk_iter(note)  # single queries take quadratic time
    if (offsets < 0).any():
        return None
    with open(file.filename, "rb") as raw:
        content = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    if offsets.max() + int(np.prod(chunk)) * field.dtype.itemsize > len(content):
        return None
    return _MappedChunks(content, offsets, chunk)


def _library(box: BoxFile) -> Read:
    """Returns a reader through the HDF5 library, which one thread can use at a time."""
    lock = threading.Lock()
    file: Any = h5py.File(box.path, "r")

    def read(name: str, corner: np.ndarray, out: np.ndarray) -> None:
        with lock, reading(box.path, name):
            np.copyto(out, file[name][_window(corner, out.shape[1:])])

    return read


def _window(corner: np.ndarray, sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slices of a crop with all its channels."""
    return slice(None), *(slice(int(start), int(start) + size) for start, size in zip(corner, sizes, strict=True))
