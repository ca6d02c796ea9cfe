"""`tutti tune` on the ranks: one change after another is measured under a time budget, and a recipe is written."""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti import units
from tutti.bench.greedy_search import GreedySearch, TriedChange
from tutti.bench.measure import Report, measure
from tutti.bench.results import Measurement, write_measurements
from tutti.bench.session import Session, open_session
from tutti.bench.suggestions import Suggestion
from tutti.config.load import resolve
from tutti.config.recipes import DEFAULT_RUN, dump_yaml, find, parse_yaml
from tutti.errors import ConfigError, TrainingError, TuttiError
from tutti.ranks.placement import Placement
from tutti.runs.files import write_durably
from tutti.runs.folder import RunFolder
from tutti.train.build import agreed

FIRST_LINE = "# Made by tutti tune"


def check_target(path: Path, recipe: str) -> None:
    """Refuse to overwrite a file that tutti tune did not write, and a folder that cannot be written."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--write {path}: expected a name that ends in .yaml.")
    if path.exists() and path.resolve() == find(recipe)[0].resolve():
        raise ConfigError(f"--write {path}: it would extend itself. Choose another name.")
    if path.exists() and not _is_ours(path):
        raise ConfigError(f"--write {path}: a file that tutti tune did not write is there. Choose another name.")
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise ConfigError(f"--write {path}: {path.parent} is not a folder that can be written. Choose another one.")


def write_recipe(
    path: Path, recipe: str, given: Sequence[str], search: GreedySearch, conditions: Mapping[str, Any]
) -> None:
    """Write the tuned recipe so that it loads from where it is."""
    write_durably(path, show_recipe(path.parent, recipe, given, search, conditions))


def show_recipe(
    folder: Path, recipe: str, given: Sequence[str], search: GreedySearch, conditions: Mapping[str, Any]
) -> str:
    """The text of the tuned recipe, for a file in a folder."""
    first, last = (figure.median if figure else 0.0 for figure in (search.tried[0].after, search.speed))
    speeds = f"{units.number(first)} -> {units.number(last)} samples/s, {search.gain:.2f} times as fast"
    lines = [f"{FIRST_LINE} from {recipe}: {speeds}.", *(f"#   {name}: {value}" for name, value in conditions.items())]
    notes: dict[str, str] = {text.partition("=")[0]: "given on the command line" for text in given}
    for change in search.tried[1:]:
        if change.kept:
            notes |= {text.partition("=")[0]: _gained(change) for text in change.overrides}
    kept = [f"{key}={value}" for key, value in search.kept.items()]
    if not kept:
        lines.append("# Nothing that was tried helped beyond the noise.")
    values = _nested([*given, *kept])
    return "\n".join([*lines, "", _leaf("extends", extends(recipe, folder)), *_show(values, notes)]) + "\n"


def extends(recipe: str, folder: Path) -> str:
    """What a file in a folder says to extend a recipe: a name, or a path that starts there."""
    path, run = find(recipe)
    if ".yaml" not in recipe and ".yml" not in recipe:
        return recipe
    start = os.path.relpath(path.resolve(), folder.resolve())
    return start if run == DEFAULT_RUN else f"{start}/{run}"


def _gained(change: TriedChange) -> str:
    before, after = (units.number(figure.median) if figure else "?" for figure in (change.before, change.after))
    return f"{change.gain or 1:.2f} times as fast ({before} -> {after} samples/s): {change.why}"


def _nested(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as a recipe has them; the later one counts."""
    values: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        *sections, last = key.split(".")
        place = values
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = parse_yaml(value, f"override {text!r}")
    return values


def _show(values: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Lines of YAML, each key with its note above it."""
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        if prefix + key in notes:
            yield f"{indent}# {notes[prefix + key]}"
            yield from (indent + line for line in _leaf(key, value).splitlines())
        else:
            yield f"{indent}{key}:"
            yield from _show(value, notes, f"{prefix}{key}.")


def _leaf(key: str, value: Any) -> str:
    if isinstance(value, dict | list):
        return dump_yaml({key: value})
    return f"{key}: {dump_yaml([value]).strip()[1:-1]}"


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text().startswith(FIRST_LINE)
    except (OSError, UnicodeDecodeError):
        return False


RESULT, RECIPE, PICTURE = "tune.json", "tuned.yaml", "tune.png"
_TRIALS = 5
_CHANGES = 20  # that should fit into the time
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 15.0  # of the trials of a change


@dataclass(frozen=True)
class TuneRequest:
    """What a user wants tuned, for how long, and what may change."""

    recipe: str
    overrides: tuple[str, ...]
    minutes: float
    allow: tuple[str, ...]
    write: Path | None

    @property
    def seconds(self) -> float:
        """About how long to measure each change."""
        return min(_MOST_SECONDS, max(_LEAST_SECONDS, 60 * self.minutes / _CHANGES))


@dataclass(frozen=True)
class Tuned:
    """The result of tuning."""

    search: GreedySearch
    folder: RunFolder
    recipe: Path
    spent: bool  # the time was over before all changes were tried


class Budget:
    """The time left for trying changes; the next one is expected to take as long as the longest of the last three."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._end = self._last + seconds
        self._costs: list[float] = []

    def lap(self) -> None:
        """Record that a change has been tried."""
        now = self._clock()
        self._costs.append(now - self._last)
        self._last = now

    @property
    def is_spent(self) -> bool:
        return self._clock() + max(self._costs[-3:], default=0.0) > self._end


def tune(
    asked: TuneRequest,
    placement: Placement,
    folder: RunFolder | None,
    report: Report,
    show: Callable[[TriedChange], None],
) -> Tuned:
    """Try changes until none is left or the time is spent; every rank enters and gets the same result."""
    config = resolve(asked.recipe, asked.overrides).config
    with open_session("tune", config, placement, folder) as session:
        group, budget = session.group, Budget(60 * asked.minutes)
        if asked.write:
            target = asked.write
            agreed(group, lambda: check_target(target, asked.recipe) if group.is_first else None)
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores is what is tried
        own = report if group.is_first else (lambda _: None)
        found = [measure(session, config, "as it is", asked.overrides, _TRIALS, asked.seconds, own)]
        search = GreedySearch(found[0], asked.allow)
        _keep(session, asked, search, found, show)
        budget.lap()
        while chosen := _choose(session, search, budget):
            overrides = (*asked.overrides, *search.overrides_with(chosen))
            outcome = _try(session, asked, overrides, chosen, own)
            search.note(chosen, outcome)
            found += [outcome] if isinstance(outcome, Measurement) else []
            _keep(session, asked, search, found, show)
            budget.lap()
        spent = group.from_first(search.next() is not None)
        return Tuned(search, session.folder, asked.write or session.folder.path / RECIPE, spent)


def _choose(session: Session, search: GreedySearch, budget: Budget) -> Suggestion | None:
    """The next change, chosen by rank 0: clocks and processors of other ranks may differ."""
    return session.group.from_first(None if budget.is_spent else search.next(), Suggestion | None)


def _try(
    session: Session, asked: TuneRequest, overrides: tuple[str, ...], chosen: Suggestion, report: Report
) -> Measurement | str:
    """Measure a change, or return why it cannot be measured; the same on all ranks."""
    try:
        try:
            config = resolve(asked.recipe, overrides).config
            return measure(
                session,
                config,
                chosen.text,
                overrides,
                _TRIALS,
                asked.seconds,
                lambda text: report(f"{chosen.text}: {text}"),
            )
        except TuttiError as error:
            if not error.agreed:
                session.group.agree(error)
            raise
        except Exception as error:  # of a compiler, for want of memory: ranks that had none wait to agree on theirs
            session.group.agree(TrainingError(f"{type(error).__name__}: {error}"))
            raise
    except TuttiError as error:
        if not isinstance(error, TrainingError) and error.exit_code != TuttiError.exit_code:
            raise  # a rank is gone, or the run is to end
        return str(error)


def _keep(
    session: Session,
    asked: TuneRequest,
    search: GreedySearch,
    found: list[Measurement],
    show: Callable[[TriedChange], None],
) -> None:
    """Write the results so far, so that nothing is lost if tuning is interrupted."""
    if not session.group.is_first:
        return
    show(search.tried[-1])
    more = {
        "recipe": asked.recipe,
        "given": list(asked.overrides),
        "minutes": asked.minutes,
        "allowed": list(asked.allow),
        "gain": search.gain,
        "kept": search.kept,
        "rungs": [change.content() for change in search.tried],
    }
    write_measurements(session.folder.path / RESULT, found, more)
    segment = session.record.content["segments"][-1]
    conditions = {
        "ranks": f"{session.group.world_size} on {', '.join(dict.fromkeys(session.group.hosts))}",
        "device": f"{session.device_name}, {units.count(found[0].threads, 'thread')} a rank, "
        f"{units.count(found[0].cores, 'core')} a host",
        "versions": ", ".join(f"{name} {version}" for name, version in segment["versions"].items()),
        "trials": f"{_TRIALS}, of about {asked.seconds:g} s in all; medians",
        "when": segment["started"],
        "all figures": session.folder.path / RESULT,
    }
    for path in filter(None, (session.folder.path / RECIPE, asked.write)):
        write_recipe(path, asked.recipe, asked.overrides, search, conditions)
