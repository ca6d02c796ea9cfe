"""Sites: what a cluster is like, in YAML; a user's own beside the recipe or in ~/.config/tutti/sites."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic

from tutti.config.recipes import read_yaml
from tutti.config.schema import Count, Section, Switch
from tutti.errors import ConfigError, nearest

BUILT_IN = Path(__file__).parent / "sites"


class Site(Section):
    """A cluster: its scheduler, how ranks are started there, and what its jobs usually say."""

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
    environment: dict[str, str] = {}
    directives: dict[str, str] = {}  # other words for the scheduler than its usual ones
    extra_directives: tuple[str, ...] = ()

    @property
    def own_file(self) -> Path:
        """Where a user keeps a version of their own."""
        return user_sites() / f"my-{self.name}.yaml"


def user_sites() -> Path:
    """The folder of the user's own sites."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "tutti" / "sites"


def load_site(name: str, beside: Path | None = None) -> Site:
    """The site of a name or a path, with what it extends filled in."""
    path = _find(name, beside, ())
    return _validate(_read_chain(path, beside, ()) | {"name": path.stem}, path)


def site_names(beside: Path | None = None) -> list[str]:
    """The names that can be given, a user's own first."""
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
    return f"site {path}: {key}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}."
