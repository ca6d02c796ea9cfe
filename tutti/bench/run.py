"""`tutti bench` on the ranks: one recipe, or variants of it one after another in the same ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.bench.measure import Tell, measure
from tutti.bench.results import Measurement, write_measurements
from tutti.bench.session import Session, open_session
from tutti.bench.verdict import Verdict, judge
from tutti.config.check import check_parts
from tutti.config.load import resolve
from tutti.config.recipes import read_yaml
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder

RESULT = "bench.json"
PICTURE = "bench.png"


@dataclass(frozen=True)
class Variant:
    """A recipe with some overrides, under a name."""

    name: str
    overrides: tuple[str, ...]
    config: RunConfig


@dataclass(frozen=True)
class Bench:
    """What a measurement came to."""

    folder: RunFolder
    found: Sequence[Measurement]
    verdicts: Sequence[Verdict]


def read_variants(path: Path | None, recipe: str, overrides: Sequence[str]) -> list[Variant]:
    """The variants of a YAML file, each on top of the command line's overrides; without a file, the recipe as it is."""
    own = Variant("", (), resolve(recipe, overrides).config)
    if path is None:
        return [own]
    content = read_yaml(path, "--variants")
    if not isinstance(content, dict) or not content:
        raise ConfigError(
            f'--variants {path}: expected names, each with a list of overrides: "more: [data.workers=8]".'
        )
    found = []
    for name, words in content.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                f"--variants {path}: {name!r} has {words!r}: expected a list of overrides, as in [epochs=2]."
            )
        try:
            found.append(Variant(str(name), tuple(words), resolve(recipe, [*overrides, *words]).config))
        except ConfigError as error:
            raise ConfigError(f"--variants {path}: {name!r}: {error}") from None
    return found


def check(variants: Sequence[Variant], ranks: int, trials: int, seconds: float) -> None:
    """Refuse what is wrong before ranks are started."""
    if trials < 2:
        raise ConfigError(f"--trials {trials}: expected 2 or more, since one says nothing about the spread. Try 5.")
    if not seconds > 0:
        raise ConfigError(f"--seconds {seconds:g}: expected a number above 0. Try 20.")
    for variant in variants:
        if variant.config.framework != "torch":
            raise ConfigError(
                f"framework={variant.config.framework} cannot be measured: expected torch. Trace it with log.profile."
            )
        check_parts(variant.config, ranks)


def bench(
    variants: Sequence[Variant],
    placement: Placement,
    folder: RunFolder | None,
    trials: int,
    seconds: float,
    tell: Tell,
) -> Bench:
    """Measure all variants and judge each; every rank enters and gets the same."""
    with open_session("bench", variants[0].config, placement, folder) as session:
        found, verdicts = [], []
        for variant in variants:
            label = f"{variant.name}: " if variant.name else ""
            found.append(_measure(session, variant, trials, seconds, lambda text, label=label: tell(label + text)))
            verdicts.append(judge(found[-1]))
            if session.group.is_first:
                more: dict[str, Any] = {"verdicts": [each.plain() for each in verdicts]}
                write_measurements(session.folder.path / RESULT, found, more)
        return Bench(session.folder, found, verdicts)


def _measure(session: Session, variant: Variant, trials: int, seconds: float, tell: Tell) -> Measurement:
    own = tell if session.group.is_first else (lambda _: None)
    return measure(session, variant.config, variant.name, variant.overrides, trials, seconds, own)
