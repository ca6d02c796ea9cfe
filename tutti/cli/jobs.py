"""`tutti submit`, `tutti status`, `tutti logs` and `tutti cancel`: runs as jobs of a cluster."""

import contextlib
import os
import sys
import time as clock
from pathlib import Path
from typing import Annotated

import typer

from tutti import units
from tutti.cli.options import Account, Directives, Overrides, Preflight, Queue, Recipe, RunsFolder, examples
from tutti.errors import FolderError
from tutti.launch.cluster.requeue import CANCELLED, ended_early, finish, requeue_run
from tutti.launch.cluster.requeue import begin as begin_job
from tutti.launch.cluster.resources import Wishes, show_time
from tutti.launch.cluster.staging.script import StagingWishes
from tutti.launch.cluster.status import Status, cancel_job, choose, follow_output, logged_ranks, look, output_files
from tutti.launch.cluster.submission import describe_missing_data, prepare, submit_run
from tutti.runs.folder import RunFolder
from tutti.runs.jobs import Attempt, describe, find_jobs, read_job

RunPath = Annotated[Path, typer.Argument(help="A run folder.")]

app = typer.Typer()


@app.command(
    epilog=examples(
        "tutti submit digits --on slurm --nodes 2 --ranks-per-node 2 --time 2:00:00",
        "tutti submit nbody/short --on perlmutter --account m1234 --nodes 8 --queue debug --time 30 epochs=3",
        "tutti submit digits --on polaris --account datascience --nodes 1 --dry-run",
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
    directive: Directives = None,
    max_requeues: Annotated[int, typer.Option(help="How often the run may be requeued.")] = 10,
    preflight: Preflight = False,
    stage_environment: Annotated[
        bool | None,
        typer.Option(
            "--stage-environment/--no-stage-environment",
            help="Copy the Python environment to the disks of the nodes, and start ranks from there.",
            show_default="the site's",
        ),
    ] = None,
    local_disk: Annotated[
        str | None, typer.Option(help="The folder of a node's own disk.", show_default="$SLURM_TMPDIR, $TMPDIR or /tmp")
    ] = None,
    keep_staged: Annotated[bool, typer.Option("--keep-staged", help="Leave the copies on the nodes.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script and write nothing.")] = False,
) -> None:
    """Submit a recipe to a cluster; the job is requeued at its time limit until the run is complete."""
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
    staging = StagingWishes(stage_environment, local_disk, keep_staged)
    submission = prepare(recipe, overrides or [], on, wishes, max_requeues, preflight, staging)
    if warning := describe_missing_data([submission.config]):
        print(warning, file=sys.stderr)
    if dry_run:
        print(submission.script(submission.planned_folder()), end="")
        return
    folder, job_id = submit_run(submission)
    resources = submission.resources
    print(f"job:        {submission.site.scheduler} {job_id}, {resources.describe()}, {show_time(resources.seconds)}")
    print(f"run folder: {folder.path}")
    print(f"script:     {folder.path / 'job.sh'}")
    print(f"follow:     tutti status {folder.path}\n            tutti logs --follow {folder.path}")


@app.command()
def requeue(
    folder: RunPath,
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
    ending = finish(run, code or 0, told_early=told and ended_early(os.environ, clock.time()))
    if ending.cause:
        print(ending.cause.message(run))
    outcome = ending.decision.outcome
    print(f"tutti: {describe(outcome, ending.decision.reason)}.", flush=True)
    if outcome == "again" and not requeue_run(run):
        print(f"tutti: {describe('stopped', CANCELLED)}.", flush=True)
    sys.exit(0 if outcome in ("again", "complete") else ending.code)


@app.command(epilog=examples("tutti status", "tutti status runs/digits/2026-11-15_101500_n4"))
def status(
    folder: Annotated[Path | None, typer.Argument(help="A run folder.", show_default="all submitted runs")] = None,
    out: RunsFolder = Path("runs"),
) -> None:
    """Print the status of submitted runs: state, starts, steps, metrics, time left."""
    if folder is not None:
        _print_one(look(choose(folder, out)))
        return
    found = find_jobs(out) if out.is_dir() else []
    if not found:
        print(f"no submitted runs in {out}")
        return
    titles = ("job", "recipe", "state", "starts", "step", "metrics", "run folder")
    left = [title for title in titles if title not in ("starts", "step")]
    units.print_table(titles, (_row(look(run)) for run in found), left)


@app.command(epilog=examples("tutti logs --follow", "tutti logs runs/digits/2026-11-15_101500_n4 --rank 3"))
def logs(
    folder: Annotated[
        Path | None, typer.Argument(help="A run folder.", show_default="the newest submitted run")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="One rank's log.", show_default="the job's output")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the job has ended.")] = False,
    out: RunsFolder = Path("runs"),
) -> None:
    """Print the output of a job or the log of one of its ranks."""
    run = choose(folder, out)
    if rank is not None:
        _check_rank(run, rank)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for text in follow_output(run, rank):
                print(text, end="", flush=True)
        return
    files = output_files(run, rank)
    found = [path for path in files if path.is_file()]
    if not found:
        name = files[-1] if files else run.logs / "job-*.out"
        raise FolderError(
            f"{name} does not exist: the job has not started yet, or has so many ranks that those of a node share "
            f"{run.logs}/node-*.log. See its state with: tutti status {run.path}"
        )
    for path in found:
        print(path.read_text(errors="replace"), end="")


def _check_rank(run: RunFolder, rank: int) -> None:
    """Refuse a rank that neither the job of a run has nor its logs, which another start may have written."""
    submitted = range(read_job(run).resources["ranks"]) if run.job.is_file() else ()
    ranks = sorted({*logged_ranks(run), *submitted})
    if ranks and rank not in ranks:
        raise FolderError(f"--rank {rank}: {run.path} has {units.ranks(ranks)}. Choose one of them.")


@app.command(epilog=examples("tutti cancel runs/digits/2026-11-15_101500_n4"))
def cancel(folder: RunPath, out: RunsFolder = Path("runs")) -> None:
    """Cancel a submitted run: its ranks save a checkpoint and end, and it is not requeued."""
    job, asked = cancel_job(choose(folder, out))
    name = f"{job.scheduler} job {job.ids[-1] if job.ids else '?'}"
    if asked:
        print(
            f"{name}: signalled to save and end. See its state with: tutti status {folder}. "
            "A second cancel ends it at once."
        )
    else:
        print(f"{name} has already ended: {look(choose(folder, out)).state}")


def _print_one(status: Status) -> None:
    job, known = status.job, status.known
    detail = f" {known.detail}" if known and known.detail and not known.is_over else ""
    left = known.seconds_left if known else None
    time_left = f", {show_time(max(0, left))} left" if left is not None else ""
    print(f"run folder  {status.folder.path}")
    nodes, ranks = units.count(job.resources["nodes"], "node"), units.count(job.resources["ranks"], "rank")
    print(f"recipe      {job.recipe} on {nodes}, {ranks}")
    print(f"job         {job.scheduler} {job.ids[-1] if job.ids else '?'} at {job.site}, submitted {job.submitted}")
    print(f"state       {status.state}{detail}{time_left}")
    print(f"starts      {len(job.attempts)} of at most {job.max_requeues + 1}")
    for attempt in job.attempts:
        print(f"            {_describe(attempt)}")
    print(f"progress    {_progress(status)}")
    if status.last_event:
        print(f"metrics     {_metrics(status)}")


def _row(status: Status) -> tuple[str, ...]:
    job = status.job
    name = f"{job.scheduler} {job.ids[-1] if job.ids else '?'}"
    starts = f"{len(job.attempts)}/{job.max_requeues + 1}"
    return name, job.recipe, status.state, starts, _steps(status), _metrics(status), str(status.folder.path)


def _describe(attempt: Attempt) -> str:
    """One start of a job: its time, its steps and its outcome."""
    if attempt.ended is None:
        return f"{attempt.started}: from step {attempt.first_step:,}"
    steps = f"checkpoints from step {attempt.first_step:,} to {attempt.last_step or 0:,}"
    return f"{attempt.started}: {steps}, exit code {attempt.code}; {describe(attempt.outcome, attempt.reason)}"


def _steps(status: Status) -> str:
    return f"{status.step:,}/{status.total_steps:,}" if status.total_steps else "-"


def _progress(status: Status) -> str:
    if not status.total_steps:
        return "no step yet"
    return f"step {_steps(status)} ({units.percent(status.step / status.total_steps, 1)})"


def _metrics(status: Status) -> str:
    """The losses and metrics of the last event that the run has recorded."""
    results = {k: v for k, v in status.last_event.items() if k.endswith("loss") or k.startswith(("train_", "valid_"))}
    return "  ".join(f"{name.replace('_', ' ')} {units.metric(name, value)}" for name, value in results.items())
