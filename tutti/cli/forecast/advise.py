"""`tutti advise`: which nodes, batch, learning rate and epochs to ask for, and what they take."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.options import examples
from tutti.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tutti.forecast.advice import Advice, Choice, Learning, Limits
    from tutti.forecast.batches import StudiedRecipe
    from tutti.forecast.epochs import NoiseBelief
    from tutti.forecast.forecast import FittedCurve
    from tutti.forecast.measuring import NextMeasurement

app = typer.Typer()


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The advice with all that it was made from, to print."""

    made: "Advice"
    fitted: "FittedCurve"
    recipe: "StudiedRecipe"
    learning: "Learning"
    limits: "Limits"
    following: "list[NextMeasurement]"


TITLES = ("choice", "nodes", "ranks", "global batch", "lr", "warm-up", "epochs", "time", "90% interval")
_DURATIONS = {"min": 1 / 60, "h": 1.0, "d": 24.0}
_RATES = 5  # of the sweep that checks a rate
_MOST_NOTES = 2


@app.command(
    epilog=examples(
        "tutti advise runs/studies/digits/2026-11-15_101500_scale_weak --fabric hpc",
        "tutti advise SCALE_STUDY --sweep SWEEP_STUDY --target valid_accuracy=0.95 --budget 500 --unit node-hours",
        "tutti advise SCALE_STUDY --noise runs/digits/2026-11-15_101500_n4 --deadline 24h --json",
        "tutti advise SCALE_STUDY --sweep SWEEP_STUDY --write large.yaml",
    )
)
def advise(
    study: Annotated[Path, typer.Argument(help="The folder of a study of tutti scale.")],
    sweep: Annotated[
        Path | None, typer.Option(help="The folder of a sweep over batches.", metavar="STUDY", show_default=False)
    ] = None,
    noise: Annotated[
        Path | None, typer.Option(help="A run with a measured noise scale.", metavar="RUN", show_default=False)
    ] = None,
    budget: Annotated[float | None, typer.Option(help="The most that the run may cost.")] = None,
    unit: Annotated[str | None, typer.Option(help="node-hours or gpu-hours.", show_default="node-hours")] = None,
    deadline: Annotated[str | None, typer.Option(help="The most that it may take: 30min, 24h or 2d.")] = None,
    target: Annotated[
        str | None, typer.Option(help="What is to be reached.", metavar="METRIC=NUMBER", show_default="the sweep's")
    ] = None,
    efficiency: Annotated[str | None, typer.Option(help="The least efficiency to advise.", show_default="50%")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks on a full node.", show_default="the most that were measured")
    ] = None,
    most_nodes: Annotated[
        int | None, typer.Option(help="The most nodes to advise.", show_default="16 times the measured ones")
    ] = None,
    fabric: Annotated[
        str | None, typer.Option(help="The network between nodes: hpc (InfiniBand, Slingshot) or tcp (Ethernet).")
    ] = None,
    link: Annotated[str | None, typer.Option(help="The rate and latency of a node's link: 200Gbit,3us.")] = None,
    collectives: Annotated[
        Path | None, typer.Option(help="The same, measured: a run of tutti bench collectives.", metavar="RUN")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the choices as a recipe.", metavar="RECIPE.yaml", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Advise on nodes, global batch, learning rate, epochs and node-hours, each with its interval and reasons."""
    from tutti.cli.forecast.forecast import read_fabric, read_link, read_share
    from tutti.forecast.advice import KNEE, LEAST_EFFICIENCY, Limits, learn
    from tutti.forecast.advice import advise as make_advice
    from tutti.forecast.batches import read_recipe, read_sweep
    from tutti.forecast.forecast import fit_curve
    from tutti.forecast.measuring import measure_next
    from tutti.forecast.studies import read_study

    network = read_fabric(fabric)
    least = read_share(efficiency) if efficiency is not None else LEAST_EFFICIENCY
    for option, value in (("--ranks-per-node", ranks_per_node), ("--most-nodes", most_nodes)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: expected 1 or more.")
    _check_new(write)
    measured = read_study(study)
    curve = measured.curve(ranks_per_node, least=1 if sweep else 2)
    known = read_link(curve, link, collectives, None, measured.gradient_bytes)
    recipe = read_recipe(study, curve)
    limits = Limits(_budget(budget), _unit(unit, budget, recipe), _deadline(deadline), least, most_nodes)
    if target is not None and sweep is None:
        raise ConfigError(f"--target {target}: expected --sweep STUDY with it, whose runs measure the epochs.")
    found = read_sweep(sweep, target) if sweep else None
    learning = learn(recipe, found, _belief(noise))
    fitted = fit_curve(curve, network, known, alone=True)
    made = make_advice(fitted, recipe, learning, limits)
    following = measure_next(fitted, network, recipe, learning, made.choice(KNEE).option, known)
    answer = _Answer(made, fitted, recipe, learning, limits, following)
    lines = _write(write, made, recipe, learning) if write else []
    if as_json:
        values = _plain(answer)
        print(json.dumps(values | {"written": lines}, indent=1))
    else:
        _show(answer)
        print(*lines, sep="\n", end="\n" if lines else "")


def _budget(given: float | None) -> float | None:
    if given is not None and not (math.isfinite(given) and given > 0):
        raise ConfigError(f"--budget {given:g}: expected a number above 0, as in --budget 500 --unit node-hours.")
    return given


def _unit(given: str | None, budget: float | None, recipe: "StudiedRecipe") -> str:
    from tutti.forecast.advice import UNITS

    if given is None:
        return UNITS[0]
    if given not in UNITS:
        raise ConfigError(f"--unit {given}: expected {' or '.join(UNITS)}.{nearest(given, UNITS)}")
    if given == "gpu-hours" and recipe.device == "cpu":
        raise ConfigError(f"--unit {given}: the study ran on CPUs: expected node-hours. Set --unit node-hours.")
    return given


def _deadline(text: str | None) -> float | None:
    """The hours of 30min, 24h or 2d."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+\.?\d*)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in _DURATIONS or float(match[1]) <= 0:
        raise ConfigError(f"--deadline {text}: expected a time above 0 with its unit, for example 30min, 24h or 2d.")
    return float(match[1]) * _DURATIONS[match[2]]


def _belief(run: Path | None) -> "NoiseBelief | None":
    """What the noise scale of a run says about the critical batch."""
    if run is None:
        return None
    from tutti.forecast.epochs import believe
    from tutti.runs.noise_scale import read_noise_scale

    found = read_noise_scale(run)
    if found is None:
        raise ConfigError(
            f"--noise {run}: the run has no noise scale: expected one that was trained with log.noise_scale=true. "
            "Train it so for an epoch, on two ranks or with micro-batches."
        )
    belief = believe(found.value, found.low, found.high, bool(found.biased))
    biased = f" (biased by {' and '.join(found.biased)})" if found.biased else ""
    return dataclasses.replace(belief, source=f"{belief.source} at a batch of {found.batch:,}{biased}")


def _check_new(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--write {path}: expected the name of a YAML file, as in --write {path}.yaml.")
    if path.exists():
        raise ConfigError(f"--write {path}: the file exists: expected a new name. Remove it, or choose another.")


def _show(answer: _Answer) -> None:
    from tutti import units

    made, limits = answer.made, answer.limits
    rows = [_row(each, limits.unit) for each in made.choices]
    units.print_table((*TITLES, limits.unit, "90% interval "), rows)
    if made.unmet:
        print(made.unmet)
    print(*_sentences(made, answer.fitted, answer.recipe, answer.learning, answer.following), sep="\n")


def _row(choice: "Choice", unit: str) -> list[str]:
    from tutti import units
    from tutti.forecast.advice import interval, show_hours

    each = choice.option
    hours, low, high = interval(each.hours)
    cost, least, most = interval(each.cost(unit))
    return [
        choice.name,
        units.count(each.nodes),
        units.count(each.ranks),
        units.count(each.global_batch),
        f"{choice.rate.lr:.2g}",
        f"{choice.rate.warmup_epochs:g}",
        units.number(interval(each.epochs)[0]),
        show_hours(hours),
        f"{show_hours(low)} to {show_hours(high)}",
        units.number(cost),
        f"{units.number(least)} to {units.number(most)}",
    ]


def _sentences(
    made: "Advice",
    fitted: "FittedCurve",
    recipe: "StudiedRecipe",
    learning: "Learning",
    following: "list[NextMeasurement]",
) -> list[str]:
    from tutti.forecast.advice import KNEE
    from tutti.forecast.measuring import describe_next

    knee = made.choice(KNEE)
    said = [_reasons(made), _basis(recipe, learning), _assumed(fitted, recipe, learning)]
    said += [f"Not considered: {made.stopped}."] if made.stopped else []
    said.append(_rate(knee, recipe, learning))
    said.append(describe_next(following, knee.option.ranks))
    notes = dict.fromkeys((*made.notes, *fitted.warnings))
    return said + [f"Note: {note}." for note in list(notes)[:_MOST_NOTES]]


def _reasons(made: "Advice") -> str:
    """Why each choice has its name; one that is the same as another is named with it."""
    groups: dict[int, list[Choice]] = {}
    for each in made.choices:
        groups.setdefault(each.option.ranks, []).append(each)
    parts = []
    for group in groups.values():
        names = " and ".join(each.name for each in group)
        why = [each.reasons[0] for each in group]
        parts.append(f"{names}: {', '.join([*why, *group[0].reasons[1:-1]])}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _basis(recipe: "StudiedRecipe", learning: "Learning") -> str:
    from tutti import units

    if learning.curve is None:
        epochs = units.count(recipe.epochs, "epoch")
        return (
            f"These are hardware numbers only, for as many samples as the recipe's {epochs} have: without "
            "--sweep or --noise nothing is known about what another global batch needs."
        )
    ends = (learning.curve.noise_quantile(each) for each in (0.5, 0.05, 0.95))
    noise = units.interval(lambda value: units.count(round(float(f"{value:.3g}"))), *ends)
    if learning.sweep is None:
        at = units.count(learning.given.global_batch)
        source = learning.belief.source if learning.belief else ""
        return (
            f"The critical batch is {noise} at 90 %, from {source}; the recipe's "
            f"{units.count(recipe.epochs, 'epoch')} at a batch of {at} are taken to reach what you want."
        )
    sweep = learning.sweep
    batches = ", ".join(units.count(each.global_batch) for each in sweep.reached)
    more = f" and {learning.belief.source}" if learning.belief else ""
    return (
        f"Epochs are those to {sweep.metric}={sweep.target:g}, measured at batches of {batches}{more}: the critical "
        f"batch, at which they double, is {noise} at 90 %."
    )


def _assumed(fitted: "FittedCurve", recipe: "StudiedRecipe", learning: "Learning") -> str:
    from tutti import units

    batch = units.count(recipe.fixed_batch)
    if fitted.curve.mode == "weak":
        return (
            f"The batch of a rank stays at {batch}, as in the study, so the global batch grows with the ranks; "
            "validation, checkpoints and waiting in a queue are not in the times."
        )
    return (
        f"The global batch of the study, {batch}, is kept, so the batch of a rank shrinks with the ranks; validation, "
        "checkpoints and waiting in a queue are not in the times."
    )


def _rate(knee: "Choice", recipe: "StudiedRecipe", learning: "Learning") -> str:
    low, high = knee.rate.band
    steps = [low * (high / low) ** (place / (_RATES - 1)) for place in range(_RATES)]
    values = ",".join(f"{value:.2g}" for value in steps)
    target = f" --target {learning.sweep.metric}={learning.sweep.target:g}" if learning.sweep else ""
    words = " ".join([recipe.name, *recipe.overrides])
    return (
        f"Learning rate of the knee: {knee.rate.lr:.2g} ({low:.2g} to {high:.2g}), {knee.rate.reason}; check it with "
        f"tutti sweep {words} batch.global={knee.option.global_batch} schedule.scaling=none --set optim.lr={values}"
        f"{target}"
    )


def _plain(answer: _Answer) -> dict[str, Any]:
    made, fitted, limits = answer.made, answer.fitted, answer.limits
    curve, sweep = answer.learning.curve, answer.learning.sweep
    return {
        "recipe": answer.recipe.name,
        "overrides": list(answer.recipe.overrides),
        "mode": fitted.curve.mode,
        "unit": limits.unit,
        "choices": [_plain_choice(each, limits.unit) for each in made.choices],
        "critical_batch": curve.noise_quantile(0.5) if curve else None,
        "critical_batch90": [curve.noise_quantile(end) for end in (0.05, 0.95)] if curve else None,
        "epochs_from": "sweep" if sweep else "noise scale" if curve else "recipe",
        "target": {sweep.metric: sweep.target} if sweep else None,
        "stopped": made.stopped,
        "unmet": made.unmet,
        "next": [dataclasses.asdict(each) for each in answer.following],
        "warnings": list(dict.fromkeys((*made.notes, *fitted.warnings))),
    }


def _plain_choice(choice: "Choice", unit: str) -> dict[str, Any]:
    from tutti.forecast.advice import interval

    each = choice.option
    values: dict[str, Any] = {
        "choice": choice.name,
        "ranks": each.ranks,
        "nodes": each.nodes,
        "global_batch": each.global_batch,
        "lr": choice.rate.lr,
        "lr_band": list(choice.rate.band),
        "lr_is_measured": choice.rate.is_measured,
        "warmup_epochs": choice.rate.warmup_epochs,
        "planned_epochs": choice.epochs,
        "efficiency": each.efficiency,
        "throughput_from": "sweep" if each.is_swept else "study",
        "reasons": list(choice.reasons),
    }
    draws = {"epochs": each.epochs, "hours": each.hours, "samples_per_second": each.samples_per_second}
    for name, drawn in (draws | {unit.replace("-", "_"): each.cost(unit)}).items():
        values[name], *values[f"{name}90"] = interval(drawn)
    return values


def _write(path: Path, made: "Advice", recipe: "StudiedRecipe", learning: "Learning") -> list[str]:
    """Write a recipe with a run for each choice, and return the lines that start them."""
    from tutti.config.load import resolve
    from tutti.config.recipes import dump_yaml
    from tutti.forecast.advice import KNEE
    from tutti.forecast.batches import recipe_values

    runs = {
        each.name: recipe_values(recipe, each.option.global_batch, each.rate, each.epochs, learning.sweep, path.parent)
        for each in made.choices
    }
    head = "# Written by tutti advise: the knee, the cheapest and the fastest choice.\n"
    try:
        with path.open("x") as file:
            file.write(head + dump_yaml({"base": {"extends": KNEE}, **runs}))
    except OSError as error:
        raise ConfigError(f"--write {path}: cannot be written: {error.strerror}. Choose another place.") from error
    resolve(str(path))
    return [f"recipe:     {path}", *(_start(path, each, recipe.on) for each in made.choices)]


def _start(path: Path, choice: "Choice", on: str | None) -> str:
    """The command that starts a choice, with the upper end of its interval as time limit."""
    from tutti.forecast.advice import KNEE, interval

    each = choice.option
    name = str(path) if choice.name == KNEE else f"{path}/{choice.name}"
    if each.nodes == 1 and on is None:
        return f"{choice.name + ':':<11} tutti train {name} -n {each.ranks}"
    minutes = math.ceil(interval(each.hours)[2] * 60 + 10)
    time = f"{minutes // 60}:{minutes % 60:02d}:00"
    per_node = math.ceil(each.ranks / each.nodes)
    return (
        f"{choice.name + ':':<11} tutti submit {name} --on {on or 'slurm'} --nodes {each.nodes} "
        f"--ranks-per-node {per_node} --time {time}"
    )
