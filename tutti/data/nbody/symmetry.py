"""The 48 rotations and reflections of the cube, each a permutation of the axes with signs."""

from itertools import permutations, product

import numpy as np

# Row by row: the axis of the source that becomes each axis of the result, and whether it runs backwards there.
AXES = np.array([axes for axes in permutations(range(3)) for _ in range(8)])
FLIPS = np.array([flips for _ in permutations(range(3)) for flips in product((False, True), repeat=3)])
IDENTITY = 0


def transformed(field: np.ndarray, symmetry: int) -> np.ndarray:
    """A view of a field (the last three axes are space) after a symmetry."""
    axes, flips = AXES[symmetry], FLIPS[symmetry]
    before = tuple(range(field.ndim - 3))
    turned = field.transpose(*before, *(len(before) + axis for axis in axes))
    return turned[(..., *(slice(None, None, -1) if flip else slice(None) for flip in flips))]


def channel_sources(scalars: int, symmetry: int, vectors: bool) -> list[tuple[int, int]]:
    """For every channel of the result, the source channel and its sign: scalars first, then a vector's components.

    A mirrored flow moves the other way, so components turn with the axes. With `vectors` off they stay as they are,
    which is what the tutorials do.
    """
    kept = [(channel, 1) for channel in range(scalars)]
    if not vectors:
        return kept + [(scalars + axis, 1) for axis in range(3)]
    return kept + [
        (scalars + int(axis), -1 if flip else 1) for axis, flip in zip(AXES[symmetry], FLIPS[symmetry], strict=True)
    ]
