"""The report of a rank about itself and its host, with digests of code and data."""

import hashlib
import importlib.util
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.config.check import data_paths
from tutti.config.run import RunConfig
from tutti.launch.cluster.staging.arrival import Arrival, find_arrival
from tutti.ranks.cores import read_memory, threads_per_rank
from tutti.ranks.group import DIGITS, MISSING, MOST_FILES, OWN_FOLDER, digest_of_files, digest_of_package, fingerprint
from tutti.ranks.placement import Placement

_SAMPLE_BYTES = 1 << 16


def user_code(config: RunConfig) -> dict[str, str]:
    """A digest of each module or package that the recipe names; none is imported."""
    parts = (config.data.name, config.model.name, config.loss.name, config.optim.name, *config.metrics)
    modules = sorted({name.partition(":")[0].partition(".")[0] for name in parts if ":" in name} - {"tutti"})
    return {module: digest_of_module(module) for module in modules}


def digest_of_module(name: str) -> str:
    """A digest of a module's file, or of all the files of a package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return MISSING
    if spec.submodule_search_locations:
        return digest_of_package(Path(next(iter(spec.submodule_search_locations))))
    if not spec.has_location or not spec.origin:
        return "built in"
    return digest_of_files([spec.origin], os.path.dirname(spec.origin))


def state_of(path: str) -> dict[str, Any]:
    """The state of a path: size and digest of both ends of a file, or the names in a folder, two levels deep."""
    place = Path(path)
    try:
        if place.is_file():
            return {"kind": "file", "bytes": place.stat().st_size, "digest": _ends(place)}
        if place.is_dir():
            return _state_of_folder(place)
    except OSError as error:
        return {"kind": "unreadable", "why": error.strerror or str(error)}
    return {"kind": MISSING}


def _state_of_folder(folder: Path) -> dict[str, Any]:
    files, digest, total = 0, hashlib.blake2b(), 0
    for entry in _entries(folder, levels=2):
        files += 1
        digest.update(os.path.relpath(entry.path, folder).encode())
        if files <= MOST_FILES and entry.is_file():
            total += entry.stat().st_size
            digest.update(str(entry.stat().st_size).encode())
    return {"kind": "folder", "entries": files, "bytes": total, "digest": digest.hexdigest()[:DIGITS]}


def _entries(folder: Path | str, levels: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        inside = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in inside:
        yield entry
        if levels > 1 and entry.is_dir():
            yield from _entries(entry.path, levels - 1)


def _ends(path: Path) -> str:
    """A digest of a file's first and last bytes."""
    with open(path, "rb") as file:
        digest = hashlib.blake2b(file.read(_SAMPLE_BYTES))
        file.seek(max(0, path.stat().st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]


# Variables that must be the same on all ranks, except those that select the GPU of each rank.
PREFIXES = ("OMP_", "GLOO_", "NCCL_", "CUDA_", "MASTER_")
_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True)
class Facts:
    """The report of one rank; every field has a default, so that reports of other versions of tutti can be read."""

    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    launcher: str = ""
    address: str = ""
    interface: str = ""
    port: int = 0  # at which the first rank of a host accepts link tests
    device: str = ""
    devices: list[str] = field(default_factory=list)
    fingerprint: dict[str, str] = field(default_factory=dict)
    code_folder: str = ""
    staged: Arrival | None = None  # of the first rank of a host, where a job stages its Python environment
    user_code: dict[str, str] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    cpus: list[int] = field(default_factory=list)
    threads: int = 0
    memory_free: int = 0
    memory_total: int = 0
    shared_memory_free: int = 0
    scratch: str = ""
    scratch_free: int = 0
    folder: str = ""
    folder_free: int = 0
    limits: dict[str, int] = field(default_factory=dict)  # -1 is without limit
    infiniband: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def find_facts(
    placement: Placement, config: RunConfig | None, folder: Path, address: str, interface: str, port: int
) -> Facts:
    """Collect the facts of this rank."""
    device, devices = _find_devices(placement, config)
    free, total = read_memory()
    scratch = tempfile.gettempdir()
    return Facts(
        rank=placement.rank,
        local_rank=placement.local_rank,
        local_size=placement.local_size,
        host=platform.node(),
        launcher=placement.launcher,
        address=address,
        interface=interface,
        port=port,
        device=device,
        devices=devices,
        fingerprint=fingerprint(),
        code_folder=str(OWN_FOLDER),
        staged=find_arrival(os.environ) if placement.local_rank == 0 else None,
        user_code=user_code(config) if config else {},
        data={path: state_of(path) for path in data_paths(config)} if config and placement.local_rank == 0 else {},
        cpus=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        threads=threads_per_rank(placement.local_size, os.environ, config.runtime.threads if config else None),
        memory_free=free,
        memory_total=total,
        shared_memory_free=_free_bytes("/dev/shm"),
        scratch=scratch,
        scratch_free=_free_bytes(scratch),
        folder=str(folder),
        folder_free=_free_bytes(str(folder)),
        limits=read_limits(),
        infiniband=bool(_names_in("/sys/class/infiniband")),
        environment={
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(PREFIXES) and key not in _OWN
        },
    )


def read_limits() -> dict[str, int]:
    """The limits of this rank: open files, bytes of locked memory, processes."""
    named = {
        "open files": resource.RLIMIT_NOFILE,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    return {name: _soft(limit) for name, limit in named.items()}


def _find_devices(placement: Placement, config: RunConfig | None) -> tuple[str, list[str]]:
    """The device of this rank, and the GPUs that it sees."""
    import torch

    if (config and config.runtime.device == "cpu") or not torch.cuda.is_available():
        return "cpu", []
    try:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:
        return f"failed: {str(error).splitlines()[0]}", []
    return f"cuda:{placement.local_rank if len(names) > 1 else 0}", names


def _soft(limit: int) -> int:
    soft = resource.getrlimit(limit)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _free_bytes(path: str) -> int:
    """Free bytes of the file system of a path, or of the nearest folder above it; -1 if unknown."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return -1


def _names_in(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
