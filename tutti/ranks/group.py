"""The process group of a run: ranks join it, wait for each other and agree, always with a deadline."""

import dataclasses
import hashlib
import json
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tutti import units
from tutti.config.schema import RuntimeConfig
from tutti.errors import LaunchError, TuttiError
from tutti.ranks.cores import Binding
from tutti.ranks.device import bind_rank, choose_device, set_determinism, set_threads
from tutti.ranks.hub_client import HubClient
from tutti.ranks.interfaces import choose_interface
from tutti.ranks.placement import Placement
from tutti.ranks.store import meet
from tutti.runs.files import to_dataclass

RankCheck = Callable[[], None]  # of one rank, before it meets the others
PreflightCheck = Callable[[dist.Store | None], None]  # of all ranks; given their store, if they have met

_LAST_TENSORS_SECONDS = 0.02
_LEAVE_SECONDS = 5.0  # within which all ranks have read that the run ends


class Group:
    """A joined process group; `leave` ends it. What ranks exchange here is plain data, and goes through the hub."""

    def __init__(self, placement: Placement, hub: HubClient, store: dist.Store, timeout_seconds: float) -> None:
        self.placement = placement
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.hub = hub
        self.store = store
        self.timeout_seconds = timeout_seconds
        self.hosts: list[str] = []  # of all ranks, in their order

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self, what: str, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks; the error at the deadline names those that are missing."""
        self.hub.meet(what, timeout_seconds or self.timeout_seconds)

    def agree(self, error: TuttiError | None) -> None:
        """Return if no rank has an error; otherwise all ranks raise the same one, which names the ranks that had it."""
        own = None if error is None else [type(error).__name__, str(error), platform.node()]
        count, *found = self.hub.meet("an agreement of all ranks", self.timeout_seconds, own, "some")
        if not count:
            return
        kind, texts = _error_class(found[0][1][0]), list(dict.fromkeys(text for _, (_, text, _) in found))
        if count == self.world_size and len(texts) == 1:
            agreed = kind(texts[0])
        else:
            more = [f"and {count - len(found)} more ranks"] if count > len(found) else []
            agreed = kind("\n".join([*(f"rank {rank} on host {h}: {text}" for rank, (_, text, h) in found), *more]))
        agreed.agreed = True
        raise agreed

    def gather(self, item: Any, kind: Any = None) -> list[Any]:
        """Return the items of all ranks, in the order of ranks: plain values, or instances of a dataclass `kind`."""
        found = self.hub.meet("an exchange of all ranks", self.timeout_seconds, _plain(item), "all")
        return found if kind is None else [to_dataclass(each, kind) for each in found]

    def from_first(self, item: Any, kind: Any = None) -> Any:
        """Return the item of rank 0 on every rank: plain values, or an instance of a dataclass `kind`."""
        own = _plain(item) if self.is_first else None
        [found] = self.hub.meet("a message of rank 0", self.timeout_seconds, own, "first")
        return found if kind is None else to_dataclass(found, kind)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, on the CPU in double precision; every rank must call this."""
        total = values.detach().to("cpu", torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def leave(self) -> None:
        """Destroy the group after a barrier: rank 0 may hold the store that the others still use."""
        self.barrier("the end of the run")
        release_tensors()
        dist.destroy_process_group()
        self.hub.close()


def _plain(item: Any) -> Any:
    """Return an item as other ranks receive it."""
    return json.loads(json.dumps(item, default=_simplify))


def _simplify(item: Any) -> Any:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.asdict(item)
    if isinstance(item, set | frozenset):
        return sorted(item)
    if isinstance(item, Path):
        return str(item)
    raise TypeError(f"ranks exchange plain data: expected no {type(item).__name__}")


def _error_class(name: str) -> type[TuttiError]:
    """Return the class of an error of another rank, by its name."""
    known = [TuttiError]
    for each in known:
        known += each.__subclasses__()
    return next((each for each in known if each.__name__ == name), TuttiError)


def drop_group() -> None:
    """Destroy the process group without waiting for other ranks."""
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


def release_tensors() -> None:
    """Give the threads of Gloo a moment to release the tensors of the last operation.

    They need the GIL for that. When the group is destroyed, they are joined with the GIL held, and when Python exits, a
    thread that requests the GIL aborts the process: they must have finished before.
    """
    if dist.is_initialized():
        time.sleep(_LAST_TENSORS_SECONDS)


def join(
    placement: Placement, config: RuntimeConfig, examine: Callable[[dist.Store], None] = lambda store: None
) -> Group:
    """Rendezvous with the other ranks, and initialise the process group; missing ranks are named at the deadline.

    `examine` is called after the rendezvous, before ranks connect to each other. A rank whose GPU is missing joins over
    Gloo like the others, so that it can report it to all.
    """
    backend = "cpu:gloo,cuda:nccl" if config.device != "cpu" and torch.cuda.is_available() else "gloo"
    seconds = config.start_timeout_seconds
    meeting = meet(placement, seconds)
    group = Group(placement, meeting.hub, meeting.store, config.timeout_seconds)
    try:
        group.hosts = meeting.hub.meet("the start of the run", seconds, platform.node(), "all")
        examine(meeting.store)
        choose_interface(placement, meeting.hub, seconds)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", meeting.store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
    except BaseException:
        meeting.hub.close()
        raise
    return group


@dataclass(frozen=True)
class Machine:
    """The device, threads and cores of a rank."""

    device: str  # cpu or cuda
    device_name: str
    threads: int
    binding: Binding | None = None


@dataclass(frozen=True)
class Joined:
    """A rank that has joined its process group."""

    group: Group
    device: torch.device
    machine: Machine


@contextmanager
def joined(
    config: RuntimeConfig,
    placement: Placement,
    check: RankCheck = lambda: None,
    examine: Callable[[dist.Store], None] = lambda store: None,
) -> Iterator[Joined]:
    """Bind this rank to cores, set its threads and device, and join the process group, which is destroyed at the end.

    An error of one rank, also in its `check`, is raised after the rendezvous on all ranks, so that they fail together.
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
        drop_group()
        group.hub.close()
        raise


MISSING = "missing"
OWN_FOLDER = Path(__file__).parent.parent
PACKAGES = ("torch", "numpy", "tutti")
DIGITS = 12  # of a digest
MOST_FILES = 2000
_CODE = "code"


def check_same_code(group: Group) -> None:
    """Refuse hosts with other versions of packages or of this code; every rank enters."""
    if len(set(group.hosts)) == 1:
        return
    found = disagreements(group.gather(fingerprint()), group.hosts)
    if found:
        error = LaunchError("\n".join(["hosts do not have the same code:", *(f"  {line}" for line in found)]))
        error.agreed = True
        raise error


def fingerprint() -> dict[str, str]:
    """The versions of a rank and a digest of tutti's code, in a few milliseconds."""
    versions = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **versions, _CODE: own_code()}


def disagreements(fingerprints: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """One line for each group of ranks with other versions or code than most; both lists are in the order of ranks."""
    return compare_versions(list(enumerate(hosts)), fingerprints)


def compare_versions(ranks: Sequence[tuple[int, str]], fingerprints: Sequence[Mapping[str, str]]) -> list[str]:
    """The same for ranks given as number and host."""
    lines = []
    for key in dict.fromkeys(key for each in fingerprints for key in each):
        values = [each.get(key, MISSING) for each in fingerprints]
        fix = "Install the same on all hosts, or start from a folder that they share."
        lines += [f"{text}. {fix}" for text in odd_ones(ranks, values, lambda value, key=key: _describe(key, value))]
    return lines


def odd_ones(ranks: Sequence[tuple[int, str]], values: Sequence[Any], name: Callable[[Any], str]) -> Iterator[str]:
    """Ranks, given as number and host, with another value than most; of equally frequent values, the first is right."""
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], value == values[0]))
    odd: dict[tuple[str, Any], list[int]] = {}
    for (rank, host), value in zip(ranks, values, strict=True):
        if value != usual:
            odd.setdefault((host, value), []).append(rank)
    if counts[usual] == 1:
        most = f"rank {ranks[values.index(usual)][0]} has"
    else:
        most = "all others have" if len(odd) == 1 else f"{counts[usual]} of {len(values)} ranks have"
    for (host, value), numbers in odd.items():
        has = "has" if len(numbers) == 1 else "have"
        yield f"{units.ranks(numbers)} on host {host} {has} {name(value)}, {most} {name(usual)}"


def own_code() -> str:
    """A digest of tutti's source files."""
    return digest_of_package(OWN_FOLDER)


def digest_of_package(folder: Path) -> str:
    """A digest of the names and contents of a folder's Python files."""
    return digest_of_files(_python_files(folder), str(folder))


def digest_of_files(files: Sequence[str], folder: str) -> str:
    """A digest of the names, below a folder, and the contents of files."""
    digest = hashlib.blake2b()
    for path in files:
        digest.update(path.removeprefix(folder).encode())
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:DIGITS]


def _python_files(folder: Path) -> list[str]:
    """At most so many: a package that is a user's whole home folder is not read to its end."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        found += [os.path.join(place, name) for name in sorted(files) if name.endswith(".py")]
        if len(found) >= MOST_FILES:
            break
    return found[:MOST_FILES]


def _version(package: str) -> str:
    if (module := sys.modules.get(package)) is not None:
        return str(module.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def _describe(key: str, value: str) -> str:
    if value == MISSING:
        return f"no {key}"
    return f"tutti's code with digest {value}" if key == _CODE else f"{key} {value}"


def leave_last(group: Group) -> None:
    """Have rank 0, which may hold the store, end when all others have read from it what they wait for."""
    others = group.world_size - 1
    with suppress(dist.DistError):  # nobody depends on it: the checkpoint is saved
        if not group.is_first and group.store.add("left", 1) == others:
            group.store.set("left/all", "")
        elif group.is_first and others:
            group.store.wait(["left/all"], timedelta(seconds=_LEAVE_SECONDS))
