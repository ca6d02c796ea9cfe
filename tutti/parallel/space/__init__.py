"""Samples split in space: each rank computes on a part, and ranks exchange the cells next to their parts."""

from tutti.parallel.space.mode import whole

__all__ = ["whole"]
