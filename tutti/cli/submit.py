"""`tutti submit`, and the command with which a job script begins and ends."""

import os
import sys
from pathlib import Path
from time import time as now
from typing import Annotated

import typer

from tutti.cli.options import Account, Overrides, Preflight, Queue, Recipe, examples
from tutti.launch.cluster.requeue import begin as begin_job
from tutti.launch.cluster.requeue import ended_early, finish, start_again
from tutti.launch.cluster.resources import Wishes, show_time
from tutti.launch.cluster.submission import hand_in, prepare
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import describe

app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti submit digits --on slurm --nodes 4 --ranks-per-node 4 --time 2:00:00",
        "tutti submit nbody/short --on perlmutter --account m1234 --nodes 8 --queue debug --time 30 epochs=3",
        "tutti submit digits --on polaris --account datascience --nodes 2 --dry-run",
    )
)
def submit(
    recipe: Recipe,
    on: Annotated[str, typer.Option(help="slurm, pbs, cobalt, a site (perlmutter, polaris), or a site's YAML file.")],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="Nodes to ask for.")] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks on each node, or the most on one.", show_default="the site's GPUs, or 1")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="All ranks, where nodes do not have the same number.", show_default=False)
    ] = None,
    cores_per_rank: Annotated[
        int | None, typer.Option(help="Cores of each rank.", show_default="the site's, divided")
    ] = None,
    time: Annotated[str, typer.Option(help="Time limit: 30, 30:00, 2:00:00 or 1-12:00:00.")] = "1:00:00",
    account: Account = None,
    queue: Queue = None,
    constraint: Annotated[str | None, typer.Option(help="A constraint on the nodes.")] = None,
    name: Annotated[str | None, typer.Option(help="The job's name.", show_default="the recipe's")] = None,
    directive: Annotated[
        list[str] | None, typer.Option(help="A directive in the scheduler's own syntax; may be repeated.")
    ] = None,
    max_requeues: Annotated[int, typer.Option(help="How often the run may be requeued.")] = 10,
    preflight: Preflight = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script and write nothing.")] = False,
) -> None:
    """Submit a recipe to a cluster; its job is requeued when its time is over until the run is complete."""
    wishes = Wishes(
        nodes=nodes,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        cores_per_rank=cores_per_rank,
        time=time,
        account=account,
        queue=queue,
        constraint=constraint,
        name=name,
        directives=tuple(directive or ()),
    )
    submission = prepare(recipe, overrides or [], on, wishes, max_requeues, preflight)
    if dry_run:
        print(submission.script(submission.planned_folder()), end="")
        return
    folder, job_id = hand_in(submission)
    resources = submission.resources
    print(f"job:        {submission.site.scheduler} {job_id}, {resources.describe()}, {show_time(resources.seconds)}")
    print(f"run folder: {folder.path}")
    print(f"script:     {folder.path / 'job.sh'}")
    print(f"follow:     tutti status {folder.path}\n            tutti logs --follow {folder.path}")


@app.command()
def requeue(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    begin: Annotated[str | None, typer.Option(help="The id of the job that starts.")] = None,
    code: Annotated[int | None, typer.Option(help="The exit code of the ranks.")] = None,
    told: Annotated[bool, typer.Option("--told", help="The scheduler has signalled the job to end.")] = False,
) -> None:
    """Record the start of a job, or its end and whether it is requeued; job scripts call this."""
    run = RunFolder(folder)
    if begin is not None:
        refusal = begin_job(run, begin)
        if refusal:
            print(f"tutti: {folder} is not started: {refusal}.", flush=True)
            sys.exit(1)
        return
    ending = finish(run, code or 0, told_early=told and ended_early(os.environ, now()))
    if ending.cause:
        print(ending.cause.message(run))
    outcome = ending.decision.outcome
    print(f"tutti: {describe(outcome, ending.decision.reason)}.", flush=True)
    if outcome == "again":
        start_again(run)
    sys.exit(0 if outcome in ("again", "complete") else ending.code)
