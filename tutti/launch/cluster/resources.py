"""What a site offers and what a job asks of it, in one vocabulary; each scheduler maps these words to its own."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from tutti.config.recipes import read_yaml
from tutti.config.schema import Count, Section, Switch
from tutti.errors import ConfigError, LaunchError, nearest

BUILT_IN = Path(__file__).parent / "sites"


def _as_text(value: Any) -> Any:
    """A number of YAML as text; true and false stay what they are, since a shell has no word for them."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Site(Section):
    """A cluster: its scheduler, its launcher, and the defaults of its jobs; read from YAML."""

    name: str
    about: str = ""
    scheduler: Literal["slurm", "pbs", "cobalt"]
    launcher: Literal["srun", "mpich", "pals", "open_mpi", "aprun"]
    account: str | None = None
    account_required: Switch = False
    queue: str | None = None
    constraint: str | None = None
    place: str | None = None
    filesystems: str | None = None
    whole_nodes: Switch = False  # a job has its nodes for itself, with all that is in them
    gpus_per_node: Count | None = None
    cores_per_node: Count | None = None
    cores_per_rank: Count | None = None
    threads_per_core: Count = 1  # hardware threads, where the scheduler counts those
    binding: Literal["cores", "none"] | None = None  # open: what the launcher does by itself
    interface: str | None = None  # the network interface of the ranks
    module_paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    activate: str = ""  # lines of shell, run after the modules are loaded
    container: str | None = None  # the command that runs another one in the container
    python: str | None = None  # open: the Python that submits; in a container `python`
    stage_environment: Switch = False  # copy the Python environment to the disks of the nodes
    local_disk: str | None = None  # the folder of a node's own disk
    keep_staged: Switch = False  # leave the copies there at the end of a job
    environment: dict[str, Annotated[str, pydantic.BeforeValidator(_as_text)]] = {}
    directives: dict[str, str] = {}  # other words for the scheduler than its usual ones
    extra_directives: tuple[str, ...] = ()

    @property
    def own_file(self) -> Path:
        """Return the path for the user's own version of this site."""
        return user_sites() / f"my-{self.name}.yaml"


def user_sites() -> Path:
    """Return the folder of the user's own sites."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tutti" / "sites"


def load_site(name: str, beside: Path | None = None) -> Site:
    """Load the site of a name or a path, with the values of the sites that it extends."""
    path = _find(name, beside, ())
    return _validate(_read_chain(path, beside, ()) | {"name": path.stem}, path)


def site_names(beside: Path | None = None) -> list[str]:
    """Return the names of all sites, the user's own first."""
    names = [sorted(path.stem for path in folder.glob("*.yaml")) for folder in _folders(beside)]
    return list(dict.fromkeys(name for folder in names for name in folder))


def _folders(beside: Path | None) -> Iterator[Path]:
    if beside is not None:
        yield beside / "sites"
    yield user_sites()
    yield BUILT_IN


def _find(name: str, beside: Path | None, seen: tuple[Path, ...]) -> Path:
    """A path as it is; a name beside the recipe, among the user's own, then among ours; never a file seen before."""
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"site {name!r}: no such file in {Path.cwd()}. Give the path of a site's YAML file.")
        return Path(name).resolve()
    places = [beside / f"{name}.yaml"] if beside is not None else []
    places += [folder / f"{name}.yaml" for folder in _folders(beside)]
    for path in places:
        if path.is_file() and path.resolve() not in seen and (path.parent != beside or _is_site(path)):
            return path.resolve()
    names = site_names(beside)
    raise ConfigError(
        f"unknown site {name!r}: expected one of {', '.join(names)}, or the path of a YAML file. "
        f"Your own are looked for beside the recipe and in {user_sites()}.{nearest(name, names)}"
    )


def _is_site(path: Path) -> bool:
    """Whether a file beside a recipe is a site and no recipe."""
    content = read_yaml(path, "site")
    return isinstance(content, dict) and bool({"scheduler", "extends"} & content.keys()) and "model" not in content


def _read_chain(path: Path, beside: Path | None, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a site laid over those of the one it extends."""
    content = read_yaml(path, "site")
    if not isinstance(content, dict):
        raise ConfigError(
            f"site {path}: expected a mapping of keys, for example `extends: slurm`, found {content!r:.60}."
        )
    values = {str(key): value for key, value in content.items()}
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise ConfigError(f"site {path}: extends={parent!r}: expected the name of a site, for example slurm.")
    seen = (*seen, path)
    try:
        found = _find(parent, beside, seen)
    except ConfigError as error:
        raise ConfigError(f"site {path}: extends={parent!r}: {error}") from None
    below = _read_chain(found, beside, seen)
    merged = {
        key: below[key] | values[key]
        for key in ("environment", "directives")
        if isinstance(below.get(key), dict) and isinstance(values.get(key), dict)
    }
    return below | values | merged


def _validate(values: dict[str, Any], path: Path) -> Site:
    try:
        return Site.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(dict(item), path) for item in error.errors())) from None


def _explain(error: dict[str, Any], path: Path) -> str:
    """One of pydantic's findings as a line that names the key, the expectation and the nearest right key."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = [name for name in Site.model_fields if name != "name"]
        return f"site {path}: unknown key {key!r}: expected one of {', '.join(known)}.{nearest(key, known)}"
    if error["type"] == "missing":
        return f"site {path}: {key} is missing. Set it, or begin with `extends: slurm` or `extends: pbs`."
    if key.startswith("environment.") and error["type"] == "string_type":
        return f"site {path}: {key}={error['input']!r}: expected a number or text. Put it in quotes."
    return f"site {path}: {key}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}."


_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?=\d+:\d+:\d+$))?(?:(?P<hours>\d+):(?=\d+:\d+$))?(?P<minutes>\d+)(?::(?P<seconds>\d+))?"
)


@dataclass(frozen=True)
class Wishes:
    """The resources given on the command line; the site has defaults for those that are missing."""

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
    """The resources of a job, with no number left open."""

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
