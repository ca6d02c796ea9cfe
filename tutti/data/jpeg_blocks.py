"""Some blocks of a JPEG without the others: packed images have a restart marker after each."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_SEQUENTIAL, _INTERVAL = 0xC0, 0xDD  # segments: a frame that is not progressive, the restart interval
_UPSAMPLED = 2  # pixels beside a block that enter the colours of its outermost ones


@dataclass(frozen=True)
class BlockFrame:
    """The header of a JPEG whose blocks can be decoded alone: sizes in pixels, and where the size is written."""

    width: int
    height: int
    block_width: int
    block_height: int
    size_place: int
    scan: int  # the position of the first block


def find_frame(content: bytes) -> BlockFrame | None:
    """Reads the header of a JPEG; None if its blocks cannot be decoded alone."""
    scan = content.find(b"\xff\xda\x00")
    return _read_frame(content[: scan + 5])


def cut_blocks(content: bytes, frame: BlockFrame, columns: slice, rows: slice) -> tuple[bytes, int, int]:
    """Returns a JPEG of the blocks that hold a part of the image, and the column and row at which it begins.

    Its pixels are those of the whole image, also beside its edges.
    """
    across, down = -(-frame.width // frame.block_width), -(-frame.height // frame.block_height)
    left, right = _blocks(columns, frame.width, frame.block_width)
    top, bottom = _blocks(rows, frame.height, frame.block_height)
    stored = np.frombuffer(content, np.uint8)[frame.scan : -2]
    marks = _find_restarts(stored)
    if len(marks) != across * down - 1:
        raise ValueError("it has other blocks than its header says")
    marks = np.concatenate(((-2,), marks, (len(stored),))) + frame.scan  # before and after each block
    lines = np.arange(top * across, bottom * across, across)
    spans = zip((marks[lines + left] + 2).tolist(), marks[lines + right].tolist(), strict=True)
    body = bytearray(b"\xff\xd0".join([content[start:end] for start, end in spans]))
    changed = np.frombuffer(body, np.uint8)
    marks = _find_restarts(changed)
    changed[marks + 1] = 0xD0 + np.arange(len(marks)) % 8  # decoders check that they are numbered in turn
    first = left * frame.block_width, top * frame.block_height
    width = min(right * frame.block_width, frame.width) - first[0]
    height = min(bottom * frame.block_height, frame.height) - first[1]
    size = height.to_bytes(2) + width.to_bytes(2)
    header = content[: frame.size_place] + size + content[frame.size_place + 4 : frame.scan]
    return b"".join((header, body, b"\xff\xd9")), *first


def _blocks(pixels: slice, length: int, block: int) -> tuple[int, int]:
    """The first block and the one after the last that some pixels need."""
    return max(pixels.start - _UPSAMPLED, 0) // block, -(-min(pixels.stop + _UPSAMPLED, length) // block)


def _find_restarts(stored: np.ndarray) -> np.ndarray:
    """The positions of restart markers; in coded blocks, 0 follows every other byte of 255."""
    found = np.flatnonzero(stored[:-1] == 0xFF)
    return found[stored[found + 1] >> 3 == 0xD0 >> 3]


@lru_cache(4096)  # images of one size have the same header
def _read_frame(header: bytes) -> BlockFrame | None:
    """Reads the segments before the scan, and the length of its header and the number of its components."""
    found, interval, components, place = None, 0, 0, 2
    while place + 5 < len(header) and header[place] == 0xFF:
        kind, length = header[place + 1], int.from_bytes(header[place + 2 : place + 4])
        if kind == _SEQUENTIAL:
            height, width = (int.from_bytes(header[place + at : place + at + 2]) for at in (5, 7))
            samplings = header[place + 11 : place + 2 + length : 3]
            components = len(samplings)
            across, down = (max(each >> shift & 15 for each in samplings) for shift in (4, 0))
            if components == 1:  # the blocks of a single component are 8 x 8
                across = down = 1
            scan = len(header) - 3 + int.from_bytes(header[-3:-1])
            found = BlockFrame(width, height, 8 * across, 8 * down, place + 5, scan)
        elif kind == _INTERVAL:
            interval = int.from_bytes(header[place + 4 : place + 6])
        place += 2 + length
    is_whole = place == len(header) - 5 and components in (1, 3) and header[-1] == components
    return found if is_whole and interval == 1 else None
