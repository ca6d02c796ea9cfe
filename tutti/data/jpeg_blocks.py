"""Some blocks of a JPEG without the others: packed images have a restart marker after each, and a table of sizes."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_SEQUENTIAL, _INTERVAL = 0xC0, 0xDD  # segments: a frame that is not progressive, the restart interval
_RESTART, _END = 0xD0, 0xD9  # the second byte of the first of eight restart markers, and of the marker of the end
_UPSAMPLED = 1  # pixels beside a block that enter the colours of its outermost ones
_TABLE_END = b"BLOCKS"  # after the table, which decoders pass over, since it follows the end of the image
_SIZE = np.dtype("<u2")  # of a block in bytes, with the marker after it


@dataclass(frozen=True)
class BlockFrame:
    """The header of a JPEG whose blocks can be decoded alone: sizes in pixels, and where the size is written."""

    width: int
    height: int
    block_width: int
    block_height: int
    size_place: int
    scan: int  # the position of the first block

    @property
    def shape(self) -> tuple[int, int]:
        """The number of blocks from top to bottom and from left to right."""
        return -(-self.height // self.block_height), -(-self.width // self.block_width)


def add_table(content: bytes) -> bytes:
    """Returns a JPEG with the sizes of its blocks behind it, if they can be decoded alone."""
    frame = _find_frame(content)
    if frame is None:
        return content
    stored = np.frombuffer(content, np.uint8)[frame.scan :]
    found = np.flatnonzero(stored[:-1] == 0xFF)  # in coded blocks, 0 follows every other byte of 255
    marks = found[stored[found + 1] >= _RESTART]
    sizes = np.diff(marks + 2, prepend=0)
    if len(sizes) != frame.shape[0] * frame.shape[1] or marks[-1] + 2 != len(stored):
        return content
    return content + sizes.astype(_SIZE).tobytes() + _TABLE_END


def find_frame(content: bytes) -> BlockFrame | None:
    """Reads the header of a JPEG; None if it has no table of its blocks."""
    return _find_frame(content) if content.endswith(_TABLE_END) else None


def cut_blocks(content: bytes, frame: BlockFrame, columns: slice, rows: slice) -> tuple[bytearray, int, int]:
    """Returns a JPEG of the blocks that hold a part of the image, and the column and row at which it begins.

    Its pixels are those of the whole image, also beside its edges.
    """
    left, right = _blocks(columns, frame.width, frame.block_width)
    top, bottom = _blocks(rows, frame.height, frame.block_height)
    sizes = _read_table(content, frame)
    ends = frame.scan + sizes.cumsum().reshape(frame.shape)[top:bottom, left:right]
    starts = ends[:, 0] - sizes.reshape(frame.shape)[top:bottom, left]
    first = left * frame.block_width, top * frame.block_height
    width = min(right * frame.block_width, frame.width) - first[0]
    height = min(bottom * frame.block_height, frame.height) - first[1]
    size = height.to_bytes(2) + width.to_bytes(2)
    header = content[: frame.size_place] + size + content[frame.size_place + 4 : frame.scan]
    spans = zip(starts.tolist(), ends[:, -1].tolist(), strict=True)
    cut = bytearray(b"".join([header, *[content[start:end] for start, end in spans]]))
    lengths = ends[:, -1] - starts
    moved = starts - (frame.scan + lengths.cumsum() - lengths)  # how far each row of blocks is before its old position
    marks = (ends - moved[:, None]).ravel() - 1
    np.frombuffer(cut, np.uint8)[marks] = _number_marks(len(marks))
    return cut, *first


def _find_frame(content: bytes) -> BlockFrame | None:
    scan = content.find(b"\xff\xda\x00")
    return _read_frame(content[: scan + 5])


def _read_table(content: bytes, frame: BlockFrame) -> np.ndarray:
    """The bytes of each block with the marker after it."""
    count = frame.shape[0] * frame.shape[1]
    place = len(content) - len(_TABLE_END) - count * _SIZE.itemsize
    sizes = np.frombuffer(content, _SIZE, count, max(place, 0)).astype(np.int64)
    if frame.scan + sizes.sum() != place:
        raise ValueError("it has other blocks than its header says")
    return sizes


def _blocks(pixels: slice, length: int, block: int) -> tuple[int, int]:
    """The first block and the one after the last that some pixels need."""
    return max(pixels.start - _UPSAMPLED, 0) // block, -(-min(pixels.stop + _UPSAMPLED, length) // block)


@lru_cache(4096)
def _number_marks(count: int) -> np.ndarray:
    """The second bytes of the markers after blocks: decoders check that they are numbered in turn."""
    numbers = _RESTART + np.arange(count) % 8
    numbers[-1] = _END
    return numbers.astype(np.uint8)


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
