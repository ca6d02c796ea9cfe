"""What a job asks of a cluster, in one vocabulary; each scheduler maps these words to its own."""

import math
import re
from dataclasses import dataclass

from tutti.errors import LaunchError
from tutti.launch.cluster.site import Site

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?=\d+:\d+:\d+$))?(?:(?P<hours>\d+):(?=\d+:\d+$))?(?P<minutes>\d+)(?::(?P<seconds>\d+))?"
)


@dataclass(frozen=True)
class Wishes:
    """What was asked for on the command line; what is open is the site's to say."""

    nodes: int = 1
    ranks: int | None = None
    ranks_per_node: int | None = None
    cores_per_rank: int | None = None
    time: str = "1:00:00"
    account: str | None = None
    queue: str | None = None
    constraint: str | None = None
    name: str | None = None
    directives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resources:
    """What a job gets: every number settled."""

    name: str
    nodes: int
    ranks: int
    ranks_per_node: int  # the most on one node
    cores_per_rank: int | None
    gpus_per_node: int | None
    seconds: int
    account: str | None
    queue: str | None
    constraint: str | None
    directives: tuple[str, ...] = ()  # in the scheduler's own words

    @property
    def equal(self) -> bool:
        """Whether every node has the same number of ranks."""
        return self.ranks == self.nodes * self.ranks_per_node

    def describe(self) -> str:
        """For people: 4 nodes x 2 ranks."""
        nodes = f"{self.nodes} node" + "s" * (self.nodes > 1)
        if self.equal:
            return f"{nodes} x {self.ranks_per_node} rank" + "s" * (self.ranks_per_node > 1)
        return f"{nodes}, {self.ranks} ranks, at most {self.ranks_per_node} on each"


def settle(wishes: Wishes, site: Site, recipe: str) -> Resources:
    """Fill in what the command line leaves open from the site, and refuse what cannot be."""
    for option in ("nodes", "ranks", "ranks_per_node", "cores_per_rank"):
        _check_positive(option, getattr(wishes, option))
    ranks_per_node, ranks = _count_ranks(wishes, site)
    account = wishes.account or site.account
    if site.account_required and not account:
        raise LaunchError(
            f"{site.name} charges jobs to an account and none is given: expected --account NAME. "
            f"Or keep it: `account: NAME` in {site.own_file}, below `extends: {site.name}`."
        )
    return Resources(
        name=wishes.name or re.sub(r"[^\w.-]", "-", recipe),
        nodes=wishes.nodes,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        cores_per_rank=_count_cores(wishes, site, ranks_per_node),
        gpus_per_node=site.gpus_per_node,
        seconds=parse_time(wishes.time),
        account=account,
        queue=wishes.queue or site.queue,
        constraint=wishes.constraint or site.constraint,
        directives=(*site.extra_directives, *wishes.directives),
    )


def parse_time(text: str) -> int:
    """The seconds of a time as it is written for schedulers."""
    match = _TIME.fullmatch(text.strip())
    parts = {unit: int(value or 0) for unit, value in match.groupdict().items()} if match else {}
    seconds = sum(parts.get(unit, 0) * size for unit, size in _UNITS.items())
    if seconds <= 0 or parts["seconds"] > 59 or (parts["hours"] and parts["minutes"] > 59):
        raise LaunchError(
            f"--time {text}: expected MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS, "
            "for example 30, 30:00, 2:00:00 or 1-12:00:00."
        )
    return seconds


def show_time(seconds: int) -> str:
    """Hours, minutes and seconds, as every scheduler reads them."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def _check_positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise LaunchError(f"--{option.replace('_', '-')} {value}: expected 1 or more.")


def _count_ranks(wishes: Wishes, site: Site) -> tuple[int, int]:
    """The most ranks on a node, and all of them."""
    nodes, ranks = wishes.nodes, wishes.ranks
    if ranks is None:
        each = wishes.ranks_per_node or site.gpus_per_node or 1
        return each, nodes * each
    each = wishes.ranks_per_node or math.ceil(ranks / nodes)
    if not nodes <= ranks <= nodes * each:
        raise LaunchError(
            f"--ranks {ranks} on --nodes {nodes} with at most {each} on each: expected {nodes} to {nodes * each}, at "
            "least one on every node. Change --nodes, or leave out --ranks."
        )
    return each, ranks


def _count_cores(wishes: Wishes, site: Site, ranks_per_node: int) -> int | None:
    """The cores of one rank, or None where only the scheduler knows."""
    each = wishes.cores_per_rank or site.cores_per_rank
    if site.cores_per_node is None:
        return each
    each = each or max(1, site.cores_per_node // ranks_per_node)
    if each * ranks_per_node > site.cores_per_node:
        raise LaunchError(
            f"{ranks_per_node} ranks of {each} cores need {each * ranks_per_node} cores on a node, a node of "
            f"{site.name} has {site.cores_per_node}. Lower --ranks-per-node or --cores-per-rank."
        )
    return each
