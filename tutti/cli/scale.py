"""`tutti scale`: one recipe on several numbers of ranks."""

from typing import Annotated

import typer

from tutti.cli.options import (
    JobAccount,
    JobQueue,
    JobRanksPerNode,
    JobTime,
    Overrides,
    ResumeCommand,
    Retry,
    StopTarget,
    StudyOn,
    StudyOut,
    StudyRecipe,
    StudyResume,
    examples,
)
from tutti.cli.studies import Planned, Where, recipe_of, refuse_with_resume, resume_study, start_study, wishes_for
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
def scale(
    recipe: StudyRecipe = None,
    overrides: Overrides = None,
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
    target: StopTarget = None,
    full: Annotated[bool, typer.Option("--full", help="Train the whole recipe.")] = False,
    out: StudyOut = None,
    resume: StudyResume = None,
    retry: Retry = False,
    on: StudyOn = None,
    ranks_per_node: JobRanksPerNode = None,
    time: JobTime = None,
    account: JobAccount = None,
    queue: JobQueue = None,
) -> None:
    """Run a recipe on several numbers of ranks, and show how it scales."""
    where = Where(out, on, wishes_for(on, ranks_per_node, time, account, queue))
    if resume is not None:
        options = {"--ranks": ranks, "--mode": mode, "--repeat": repeat, "--steps": steps, "--warmup": warmup}
        options |= {"--target": target, "--full": full}
        refuse_with_resume({"RECIPE": recipe, "overrides": overrides, "--on": on} | options)
        resume_study(resume, "scale", where, retry)
        return
    recipe = recipe_of(recipe, retry, "tutti scale RECIPE --ranks 1,2,4 --mode weak")
    for option, value, example in (("--ranks", ranks, "1,2,4"), ("--mode", mode, "weak")):
        if value is None:
            raise ConfigError(f"{option} is missing. Add, for example, {option} {example}.")
    goal = read_goal(steps, warmup, target, full, timed=True)
    chosen = read_mode(mode or "")
    repeats = 1 if repeat is None else repeat
    checked = scale_points(recipe, overrides or (), read_ranks(ranks or ""), chosen, goal, repeats)
    start_study(Planned("scale", recipe, tuple(overrides or ()), goal, checked, chosen), where)
