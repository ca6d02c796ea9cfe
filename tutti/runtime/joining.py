"""A rank made ready and brought together with the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tutti.config.schema import RuntimeConfig
from tutti.errors import TuttiError
from tutti.launch.binding import Binding
from tutti.runtime.device import bind_rank, choose_device, set_determinism, set_threads
from tutti.runtime.group import Group, abandon, join
from tutti.runtime.placement import Placement


@dataclass(frozen=True)
class Machine:
    """What a rank computes on."""

    device: str  # cpu or cuda
    device_name: str
    threads: int
    binding: Binding | None = None


@dataclass(frozen=True)
class Joined:
    """A rank among the others."""

    group: Group
    device: torch.device
    machine: Machine


@contextmanager
def joined(
    config: RuntimeConfig,
    placement: Placement,
    check: Callable[[], None] = lambda: None,
    examine: Callable[[dist.Store], None] = lambda store: None,
) -> Iterator[Joined]:
    """Bind this rank, give it threads and a device, and meet the others; the group ends whatever happens.

    What a rank finds wrong with itself, in its check too, it tells when all have met, so that they fail together.
    """
    binding = bind_rank(config, placement)
    threads = set_threads(config, placement)
    set_determinism(config)
    error: TuttiError | None = None
    device = torch.device("cpu")
    try:
        device = choose_device(config, placement)
        check()
    except TuttiError as found:
        error = found
    group = join(placement, config, examine)
    try:
        group.agree(error)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        yield Joined(group, device, Machine(device.type, name, threads, binding))
        group.leave()
    except BaseException:
        abandon()
        raise
