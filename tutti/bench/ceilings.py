"""Peaks of a rank's device: FLOP/s of matrix products and bandwidth of copies, measured by the rank."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tutti.bench.results import Ceilings
from tutti.ranks.device import DTYPES
from tutti.train.learner import autocast

_SECONDS = 0.2  # for each of the two, besides one call to warm up
_LEAST_CALLS = 3
_GPU_SIDE = 8192
_FIRST_CPU_SIDE, _LAST_CPU_SIDE = 256, 2048
_CPU_PRODUCT_SECONDS = 0.02
_MOST_COPIED_BYTES = 512 << 20
_USUAL_CACHE_BYTES = 32 << 20  # if the system does not report it
_CACHES = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def measure_ceilings(device: torch.device, precision: str) -> Ceilings:
    """The fastest of several large matrix products and copies, with the present number of threads.

    It allocates a few hundred megabytes: read peaks of memory before.
    """
    return Ceilings(_product_rate(device, precision), _copy_rate(device))


def cache_bytes(device: torch.device, local_ranks: int) -> int:
    """The bytes of last-level cache for each rank; ranks on the CPU of one host have equal shares."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    caches = read_caches(_CACHES, sorted(os.sched_getaffinity(0)))
    if not caches:
        return _USUAL_CACHE_BYTES // local_ranks
    reached = caches[: max(1, min(len(caches), torch.get_num_threads() * local_ranks))]
    return min(sum(reached) // local_ranks, caches[0] * torch.get_num_threads())


def read_caches(folder: Path, cores: list[int]) -> list[int]:
    """Bytes of every last-level cache of the given cores, from the files of Linux in a folder."""
    found: dict[str, int] = {}
    for core in cores:
        levels = [_describe(path) for path in (folder / f"cpu{core}" / "cache").glob("index*")]
        known = [level for level in levels if level]
        if known:
            _, sharing, size = max(known)
            found[sharing] = size
    return list(found.values())


def _describe(path: Path) -> tuple[int, str, int] | None:
    """The level of a cache, the cores that share it, and its bytes."""
    try:
        level, kind, sharing, size = (
            (path / name).read_text().strip() for name in ("level", "type", "shared_cpu_list", "size")
        )
        number, unit = (size[:-1], _UNITS[size[-1]]) if size[-1] in _UNITS else (size, 1)
        return (int(level), f"{level}:{sharing}", int(number) * unit) if kind != "Instruction" else None
    except (OSError, ValueError, IndexError):
        return None


def _product_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of square matrix products, as a forward pass in this precision does them."""
    dtype = DTYPES[precision]
    with torch.no_grad(), autocast(precision, device):
        if device.type == "cuda":
            with _as_convolutions():
                return _rate(device, 2.0 * _GPU_SIDE**3, _product(device, _GPU_SIDE, dtype))
        side = _FIRST_CPU_SIDE
        while side < _LAST_CPU_SIDE and _seconds(device, _product(device, side, dtype)) < _CPU_PRODUCT_SECONDS / 8:
            side *= 2
        return _rate(device, 2.0 * side**3, _product(device, side, dtype))


@contextmanager
def _as_convolutions() -> Iterator[None]:
    """Products of fp32 numbers as convolutions may do them, which by default is in TF32."""
    before = torch.get_float32_matmul_precision()
    if torch.backends.cudnn.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product(device: torch.device, side: int, dtype: torch.dtype) -> Callable[[], object]:
    left, right = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(2))
    return lambda: torch.mm(left, right)


def _copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy that no cache can hold, read and written ones added."""
    cached = cache_bytes(device, 1)
    size = max(64 << 20, min(4 * cached, _MOST_COPIED_BYTES))
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    return _rate(device, 2.0 * source.nbytes, lambda: target.copy_(source))


def _rate(device: torch.device, amount: float, call: Callable[[], object]) -> float:
    """What the quickest of several calls does in a second."""
    _seconds(device, call)
    end = time.perf_counter() + _SECONDS
    best, calls = float("inf"), 0
    while calls < _LEAST_CALLS or time.perf_counter() < end:
        best = min(best, _seconds(device, call))
        calls += 1
    return amount / best


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    _finish(device)
    start = time.perf_counter()
    call()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
