"""`tutti propose`: the page of an allocation request, from scaling studies and their forecast."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.options import examples
from tutti.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tutti.forecast.batches import MeasuredSweep
    from tutti.forecast.laws import Array
    from tutti.forecast.studies import ProposedRuns, StudyFacts

app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti propose runs/studies/nbody/short/2026-11-15_101500_scale_weak --site perlmutter --runs 20",
        "tutti propose STUDY --more STRONG_STUDY --site polaris --runs 8 --epochs 90 --nodes 16 --contingency 20%",
        "tutti propose STUDY --sweep SWEEP_STUDY --target valid_accuracy=0.95 --site perlmutter --runs 20",
    )
)
def propose(
    study: Annotated[Path, typer.Argument(help="The study of tutti scale that is continued by a forecast.")],
    site: Annotated[str, typer.Option(help="The cluster that is asked: perlmutter, polaris, or your own file.")],
    runs: Annotated[int, typer.Option(help="The number of whole training runs.")],
    more: Annotated[
        list[Path] | None, typer.Option(help="Another study of the recipe whose measurements are shown.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="The length of a run in epochs.", show_default="as in the recipe")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="The length of a run in steps.")] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="A sweep over batches that has measured how long a run takes.", metavar="STUDY"),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="What is to be reached.", metavar="METRIC=NUMBER", show_default="the sweep's")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes of a run.", show_default="the most that reach the efficiency")
    ] = None,
    efficiency: Annotated[str, typer.Option(help="The efficiency that a run should reach.")] = "80%",
    fabric: Annotated[
        str | None, typer.Option(help="The network between nodes: hpc or tcp.", show_default="as recorded")
    ] = None,
    link: Annotated[str | None, typer.Option(help="The rate and latency of a node's link: 200Gbit,3us.")] = None,
    collectives: Annotated[
        Path | None, typer.Option(help="A run of tutti bench collectives, for the link.", metavar="RUN")
    ] = None,
    contingency: Annotated[str, typer.Option(help="What is added to the median of the cost.")] = "15%",
    unit: Annotated[str, typer.Option(help="The unit of the request: node-hours or gpu-hours.")] = "node-hours",
    out: Annotated[Path | None, typer.Option(help="The folder for the page.", show_default="STUDY/proposal")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Write the page of an allocation request: measured, forecast, hours, node-hours and what is not known."""
    from tutti.cli.forecast.forecast import read_fabric, read_link, read_share
    from tutti.forecast.forecast import fit_curve
    from tutti.forecast.kept import keep, read_created
    from tutti.forecast.planning import batch_on, choose_nodes, plan_campaign
    from tutti.forecast.studies import (
        ProposedRuns,
        StudyForecast,
        check_project,
        explain_one_node,
        more_ranks,
        read_facts,
    )
    from tutti.launch.cluster.resources import load_site
    from tutti.report.proposal import write_proposal

    _check(runs, epochs, steps, nodes)
    _check_length(epochs, steps, sweep, target)
    place, share, threshold = load_site(site), _contingency(contingency), read_share(efficiency)
    _check_unit(unit, place.name, place.gpus_per_node)
    studies = [read_facts(each) for each in (study, *(more or ()))]
    _check_recipes(studies)
    measured = studies[0].measured
    curve = measured.curve(least=1 if link or collectives else 2)
    network = read_fabric(fabric) or measured.fabric
    known = read_link(curve, link, collectives, None, measured.gradient_bytes)
    if known is None and (reason := explain_one_node(measured)):
        raise DataError(f"{study}: no forecast can be given. {reason}")
    fitted = fit_curve(curve, network, known)
    choice = choose_nodes(fitted, threshold, nodes)
    swept = _read_sweep(sweep, target, studies[0].analysis.definition.recipe)
    batch = batch_on(fitted, choice.chosen)
    length, number = _length(studies[0], batch, choice.chosen.nodes, epochs, steps, swept)
    made = more_ranks(fitted, threshold, choice.chosen)
    kept = keep(study, curve, network, known.source if known else None, made, measured.workload)
    proposed = ProposedRuns(
        tuple(studies),
        place,
        unit,
        fitted,
        StudyForecast(curve, tuple(made), threshold=threshold),
        choice,
        plan_campaign(fitted, choice.chosen, runs, number, share),
        length,
        kept,
        read_created(kept),
        check_project(measured),
        shlex.join(["tutti", *sys.argv[1:]]),
        swept,
    )
    written = [*write_proposal(out or study / "proposal", proposed), kept]
    if as_json:
        print(json.dumps(_plain(proposed, written), indent=1))
    else:
        _show(proposed, written)


def _check(runs: int, epochs: float | None, steps: int | None, nodes: int | None) -> None:
    for option, value in (("--runs", runs), ("--steps", steps), ("--nodes", nodes)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: expected 1 or more.")
    if epochs is not None and not 0 < epochs < float("inf"):
        raise ConfigError(f"--epochs {epochs:g}: expected more than 0.")


def _check_length(epochs: float | None, steps: int | None, sweep: Path | None, target: str | None) -> None:
    options = {"--epochs": epochs, "--steps": steps, "--sweep": sweep}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given: expected one of them. Leave out {given[-1]}.")
    if target is not None and sweep is None:
        raise ConfigError(f"--target {target}: expected --sweep STUDY with it, whose runs measure the epochs.")


def _read_sweep(path: Path | None, target: str | None, recipe: str) -> "MeasuredSweep | None":
    from tutti.forecast.batches import read_sweep

    if path is None:
        return None
    found = read_sweep(path, target)
    if found.recipe != recipe:
        raise ConfigError(f"--sweep {path} is of {found.recipe}: expected a sweep of {recipe}, as the study.")
    return found


def _contingency(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not text.strip().endswith("%") or not 0 <= value <= 1:
        raise ConfigError(f"--contingency {text}: expected a share from 0% to 100%, for example --contingency 15%.")
    return value


def _check_unit(unit: str, site: str, gpus_per_node: int | None) -> None:
    from tutti.errors import nearest
    from tutti.forecast.advice import UNITS

    if unit not in UNITS:
        raise ConfigError(f"--unit {unit}: expected {' or '.join(UNITS)}.{nearest(unit, UNITS)}")
    if unit == "gpu-hours" and not gpus_per_node:
        raise ConfigError(f"--unit gpu-hours: site {site} has no gpus_per_node: expected --unit node-hours.")


def _check_recipes(studies: "list[StudyFacts]") -> None:
    names = list(dict.fromkeys(each.analysis.definition.recipe for each in studies))
    if len(names) > 1:
        raise ConfigError(f"studies of {', '.join(names)} are mixed: expected studies of one recipe with --more.")


def _length(
    facts: "StudyFacts", batch: int, nodes: int, epochs: float | None, steps: int | None, sweep: "MeasuredSweep | None"
) -> "tuple[str, int | Array]":
    """The length of a run in words, and its steps: draws of them where a sweep has measured how long a run takes."""
    from tutti import units
    from tutti.forecast.planning import count_steps, sweep_steps

    samples = facts.plan.get("train_samples")
    if not batch:
        raise ConfigError(f"{facts.measured.path}: the records do not hold the batch. Run the study again.")
    if steps is not None:
        return f"{units.count(steps, 'step')}, as given", steps
    if sweep is not None and samples:
        return sweep_steps(sweep, batch, samples)
    asked = epochs if epochs is not None else facts.config.get("epochs")
    if not samples or not asked:
        raise ConfigError(f"{facts.measured.path}: the length of a run is not known: expected --epochs or --steps.")
    words = f"{units.count(asked, 'epoch')}, {'as given' if epochs is not None else 'as in the recipe'}"
    return words, count_steps(nodes, batch, asked, samples)


def _plain(proposed: "ProposedRuns", written: list[Path]) -> dict:
    campaign = proposed.campaign
    quantiles = ("q05", "q50", "q95")
    return {
        "site": proposed.site.name,
        "nodes": campaign.made.nodes,
        "ranks": campaign.made.ranks,
        "reason": proposed.choice.reason,
        "runs": campaign.runs,
        "steps": campaign.steps,
        "global_batch": campaign.global_batch,
        "hours_of_a_run": dict(zip(quantiles, campaign.hours, strict=True)),
        "node_hours": dict(zip(quantiles, campaign.node_hours, strict=True)),
        "contingency": campaign.contingency,
        "unit": proposed.unit,
        "request": campaign.request * proposed.in_unit,
        "probability_of_enough": campaign.is_covered,
        "files": [str(path) for path in written],
    }


def _show(proposed: "ProposedRuns", written: list[Path]) -> None:
    from tutti.report.proposal import request_sentence

    print(request_sentence(proposed))
    print(proposed.choice.reason)
    for path in written:
        print(f"{'kept:' if path == proposed.kept else 'page:':<11} {path}")
