"""`tutti scale`: one recipe on several numbers of ranks."""

from typing import Annotated

import typer

from tutti.cli.options import ResumeCommand, examples, with_options
from tutti.cli.studies import Planned, StudyOptions, resume_study, start_study
from tutti.errors import ConfigError
from tutti.study.checking import read_goal
from tutti.study.scale import read_mode, read_ranks, scale_points

app = typer.Typer()


@app.command(
    cls=ResumeCommand,
    epilog=examples(
        "tutti scale digits --ranks 1,2,4 --mode weak",
        "tutti scale mnist --ranks 1,2,4,8 --mode strong --repeat 3 --target valid_accuracy=0.95",
        "tutti scale nbody/short --ranks 4,8,16 --mode weak --on slurm --ranks-per-node 4 --time 30",
        "tutti scale --resume runs/studies/digits/2026-11-15_101500_scale_weak",
    ),
)
@with_options(StudyOptions)
def scale(
    study: StudyOptions,
    ranks: Annotated[str | None, typer.Option(help="The numbers of ranks, as in 1,2,4.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="Keep the batch of each rank (weak) or the global batch (strong).")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(help="Runs of each number of ranks, in random order.", show_default="1")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps to time, without training to an end.", show_default="100")
    ] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps before those that are timed.", show_default="20")] = None,
    target: Annotated[
        str | None, typer.Option(help="Train to this, as in valid_accuracy=0.95.", metavar="METRIC=NUMBER")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train the whole recipe.")] = False,
) -> None:
    """Run a recipe on several numbers of ranks, and show how it scales."""
    if study.resume is not None:
        others = {"--ranks": ranks, "--mode": mode, "--repeat": repeat, "--steps": steps, "--warmup": warmup}
        study.refuse_with_resume(others | {"--target": target, "--full": full})
        resume_study(study.resume, "scale", study)
        return
    recipe, overrides = study.new_recipe("tutti scale RECIPE --ranks 1,2,4 --mode weak"), tuple(study.overrides or ())
    for option, value, example in (("--ranks", ranks, "1,2,4"), ("--mode", mode, "weak")):
        if value is None:
            raise ConfigError(f"{option} is missing. Add, for example, {option} {example}.")
    goal = read_goal(steps, warmup, target, full, timed=True)
    chosen = read_mode(mode or "")
    repeats = 1 if repeat is None else repeat
    checked = scale_points(recipe, overrides, read_ranks(ranks or ""), chosen, goal, repeats)
    start_study(Planned("scale", recipe, overrides, goal, checked, chosen), study)
