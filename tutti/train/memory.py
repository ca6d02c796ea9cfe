"""The memory of a run: that of its device, and the peak that a rank has measured."""

import os
import resource
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def device_memory(device: str, ranks: int = 1) -> int | None:
    """The bytes that a rank may use of the device here; None where there is no such device.

    On a CPU ranks share the memory of the host, or less where a limit is set.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit(ranks)
    return total // ranks if limit is None else min(limit, total // ranks)


def count_kills() -> int:
    """How many processes of this host the kernel has killed since it had no memory left."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def memory_limit(ranks: int = 1) -> int | None:
    """The bytes to which a process is limited here by a cgroup, which ranks share, or by `ulimit -v`; None without."""
    limits = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:
            limits.append(int(text) // ranks)
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits, default=None)
