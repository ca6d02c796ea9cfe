"""`tutti sweep`: one recipe with every combination of some of its values."""

from typing import Annotated

import typer

from tutti.cli.options import ResumeCommand, examples, with_options
from tutti.cli.studies import Planned, StudyOptions, resume_study, start_study
from tutti.errors import ConfigError
from tutti.study.checking import read_goal
from tutti.study.rates import STEPS, add_rates, rate_goal
from tutti.study.sweep import SweepGrid, read_axes, sweep_points

app = typer.Typer()


@app.command(
    cls=ResumeCommand,
    epilog=examples(
        "tutti sweep mnist --set batch.global=64,256,1024 --set schedule.scaling=none,linear,sqrt batch.base=64",
        "tutti sweep digits --set optim.lr=1e-3,3e-3 --seeds 3 -n 2 --target valid_accuracy=0.95 --at-once 4",
        "tutti sweep digits/mlp --set model.hidden=[64],[128,64]",
        "tutti sweep mnist --set 'optim={name: sgd, lr: 0.01},{name: lars, lr: 1.0}' --seeds 3",
        "tutti sweep digits --find-rate --seeds 3",
        "tutti sweep --resume runs/studies/digits/2026-11-15_101500_sweep",
    ),
)
@with_options(StudyOptions)
def sweep(
    study: StudyOptions,
    axes: Annotated[
        list[str] | None, typer.Option("--set", help="The values of a key; may be repeated.", metavar="KEY=VALUE,VALUE")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each combination.", show_default="1")] = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", help="Ranks of each run.", show_default="1")] = None,
    micro: Annotated[
        int | None, typer.Option(help="The most samples in a pass; gradients of several passes are accumulated.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Record when this is reached, and continue training.", metavar="METRIC=NUMBER"),
    ] = None,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate",
            help="Search for a learning rate in short runs, around that of the recipe or at --set optim.lr=...",
        ),
    ] = False,
    steps: Annotated[
        int | None, typer.Option(help="With --find-rate: the steps of each run.", show_default=str(STEPS))
    ] = None,
    skip_impossible: Annotated[
        bool, typer.Option("--skip-impossible", help="Leave out combinations that cannot run.")
    ] = False,
    at_once: Annotated[
        int | None,
        typer.Option(help="Runs at the same time on this machine; they slow each other down.", show_default="1"),
    ] = None,
) -> None:
    """Train every combination of some values of a recipe, with several seeds."""
    if study.resume is not None:
        others = {"--set": axes, "--seeds": seeds, "-n": ranks, "--micro": micro, "--target": target}
        others |= {"--skip-impossible": skip_impossible, "--find-rate": find_rate, "--steps": steps}
        study.refuse_with_resume(others)
        resume_study(study.resume, "sweep", study, at_once)
        return
    recipe, overrides = study.new_recipe("tutti sweep RECIPE --set batch.global=64,256"), tuple(study.overrides or ())
    if find_rate:
        if target is not None:
            raise ConfigError(f"--find-rate with --target {target}: expected one of them. Leave out --target.")
        varied, goal = add_rates(recipe, overrides, read_axes(axes) if axes else ()), rate_goal(steps)
    else:
        if steps is not None:
            raise ConfigError(f"--steps {steps} without --find-rate: expected runs of the whole recipe. Set max_steps.")
        varied, goal = read_axes(axes or ()), read_goal(None, None, target, False, timed=False)
    grid = SweepGrid(varied, 1 if seeds is None else seeds, 1 if ranks is None else ranks, micro)
    checked, left_out = sweep_points(recipe, overrides, grid, goal, skip_impossible)
    for fault in left_out:
        print(f"left out: {fault.what}: {fault.text}")
    start_study(Planned("sweep", recipe, overrides, goal, checked), study, at_once)
