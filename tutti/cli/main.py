"""The command line: one function a command; what a command needs is imported when it is called."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import tutti
from tutti.errors import ConfigError, TuttiError

app = typer.Typer(
    name="tutti",
    help="From solo to tutti: train one recipe on any number of ranks, and resume it exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Fetch data, or make some to try a recipe with.", no_args_is_help=True)
make_app = typer.Typer(help="Make data to try a recipe with, the same from the same seed.", no_args_is_help=True)
app.add_typer(data_app, name="data")
data_app.add_typer(make_app, name="make")

Recipe = Annotated[str, typer.Argument(help="A recipe's name (mnist, mnist/large_batch) or the path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example optim.lr=3e-4 epochs=2.")]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", help="Ranks to start on this machine.", show_default="1")]


class RecipeOrScript(TyperCommand):
    """A command whose options may follow a recipe, while all that follows a script is the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = not any(word.endswith(".py") and "=" not in word for word in args)
        return super().parse_args(ctx, args)


@app.command(
    epilog="Examples:\n\n"
    "    tutti train digits -n 2\n\n"
    "    tutti train mnist -n 4 optim.lr=0.02 epochs=3\n\n"
    "    mpirun -np 4 tutti train digits\n\n"
    "    tutti train digits -n 4 --resume\n\n"
    "    tutti train digits --min-ranks 2 --max-ranks 4"
)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on from the newest run (latest), a run folder or a checkpoint.", metavar="[latest|PATH]"),
    ] = None,
    preflight: Annotated[bool, typer.Option("--preflight", help="Check all ranks before they train.")] = False,
    min_ranks: Annotated[int | None, typer.Option(help="Elastic: go on while as many ranks are left.")] = None,
    max_ranks: Annotated[int | None, typer.Option(help="Elastic: take new ranks in until there are as many.")] = None,
    join: Annotated[str | None, typer.Option(help="Elastic: offer -n ranks to a job.", metavar="HOST:PORT")] = None,
    wait: Annotated[float, typer.Option(help="Elastic: seconds to wait with too few ranks.")] = 300.0,
    pause: Annotated[float, typer.Option(help="Elastic: seconds until a lost rank is started again.")] = 10.0,
) -> None:
    """Train a recipe, on ranks started here or as one of those that mpirun or srun has started."""
    if min_ranks is not None or max_ranks is not None or join is not None:
        from tutti.cli import elastic

        if preflight:
            raise ConfigError("--preflight looks at ranks that stay: leave it out with --min-ranks and --max-ranks.")
        elastic.train(recipe, overrides or [], elastic.Asked(ranks, min_ranks, max_ranks, join, resume, wait, pause))
        return
    from tutti.cli import train as command

    command.train(recipe, overrides or [], ranks, resume, preflight)


@app.command(
    epilog="Examples:\n\n    tutti run -n 4 script.py --epochs 3\n\n    mpirun -np 4 tutti run script.py",
    context_settings={"allow_interspersed_args": False},
)
def run(
    script: Annotated[str, typer.Argument(help="A Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Ranks = None,
    out: Annotated[str, typer.Option(help="Where the run folder with the logs is made.")] = "runs",
) -> None:
    """Start any script on several ranks, with the variables of torchrun; `import horovod` finds tutti's."""
    from tutti.cli import train as command

    command.run(script, arguments or [], ranks, out)


@app.command(
    epilog="Examples:\n\n"
    "    tutti doctor\n\n"
    "    tutti doctor mnist -n 4 --json doctor.json\n\n"
    "    srun -N4 tutti doctor imagenet --out /scratch/me/runs"
)
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="A recipe or run folder, for its data and code.")] = None,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", help="Ranks to start here.", show_default="2")] = None,
    out: Annotated[
        str | None, typer.Option(help="The folder that all hosts should share.", show_default="runs")
    ] = None,
    record: Annotated[Path | None, typer.Option("--json", help="Write all figures into this file.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for ranks that do not come.")] = 60.0,
) -> None:
    """Look for what would go wrong: ranks that differ, hosts that share no folder, links that are slow or dead."""
    from tutti.cli import doctor as command

    command.doctor(recipe, overrides or [], ranks, out, record, wait)


_COLLECTIVES = "Only for tutti bench collectives"


@app.command(
    epilog="Examples:\n\n"
    "    tutti bench mnist -n 2\n\n"
    "    tutti bench nbody/bs64_opt data.workers=8 --seconds 60\n\n"
    "    tutti bench nbody/short --variants benchmarks/nbody_ladder.yaml\n\n"
    "    tutti bench collectives -n 4\n\n"
    "    srun -N4 tutti bench collectives --sizes 1KB,1MB,64MB"
)
def bench(
    recipe: Annotated[str, typer.Argument(help="A recipe, or the word collectives.")],
    overrides: Overrides = None,
    ranks: Ranks = None,
    trials: Annotated[int, typer.Option(help="How often everything is measured.")] = 5,
    seconds: Annotated[float, typer.Option(help="About how long to measure a recipe, or a variant.")] = 20.0,
    variants: Annotated[
        Path | None, typer.Option(help="A YAML file of names, each with a list of overrides: measured one by one.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Message sizes, as in 1KB,1MB.", rich_help_panel=_COLLECTIVES)
    ] = None,
    operations: Annotated[
        str | None, typer.Option(help="all_reduce, broadcast, all_gather.", rich_help_panel=_COLLECTIVES)
    ] = None,
) -> None:
    """Measure where the time goes: reading, computing, communicating; and say what bounds a recipe."""
    if recipe == "collectives":
        from tutti.cli import collectives

        if variants is not None:
            raise ConfigError("--variants is for a recipe: leave it out of tutti bench collectives.")
        collectives.bench(overrides or [], ranks, trials, seconds, sizes, operations)
        return
    from tutti.cli import bench as command

    if sizes is not None or operations is not None:
        raise ConfigError("--sizes and --operations are for tutti bench collectives: leave them out for a recipe.")
    command.bench(recipe, overrides or [], ranks, trials, seconds, variants)


@app.command(
    epilog="Examples:\n\n"
    "    tutti tune mnist -n 2\n\n"
    "    tutti tune nbody/short --minutes 5 --allow precision\n\n"
    "    tutti tune digits -n 2 --write tuned.yaml"
)
def tune(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    minutes: Annotated[float, typer.Option(help="When to stop trying.")] = 5.0,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="What may change in what is learned: precision, batch; may be repeated."),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Where the tuned recipe goes, besides its run folder.")] = None,
) -> None:
    """Try what the verdict suggests, one at a time; keep what helps, and write a recipe that extends the original."""
    from tutti.cli import tune as command

    command.tune(recipe, overrides or [], ranks, minutes, allow or [], write)


@app.command(
    epilog="Examples:\n\n"
    "    tutti profile digits -n 2 --steps 20:25\n\n"
    "    nsys profile -c cudaProfilerApi tutti profile nbody/short --steps 50:55\n\n"
    "    tutti profile -n 2 horovod_script.py --epochs 1",
    cls=RecipeOrScript,
)
def profile(
    recipe: Annotated[str, typer.Argument(help="A recipe, or a Python script that uses Horovod's API.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value; for a script, its arguments.")] = None,
    ranks: Ranks = None,
    steps: Annotated[str | None, typer.Option(help="FIRST:LAST, the steps to trace.", show_default="20:25")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also what is allocated and freed.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Also which lines of code call an operator.")] = False,
) -> None:
    """Trace some steps on every rank: one timeline of all ranks for Perfetto, and a summary of where the time goes."""
    from tutti.cli import profile as command

    command.profile(recipe, overrides or [], ranks, steps, memory, stacks)


StudyRecipe = Annotated[str | None, typer.Argument(help="A recipe's name or the path of a YAML file.")]
_TARGET = "METRIC=NUMBER"
StopTarget = Annotated[str | None, typer.Option(help="Train to this, as in valid_accuracy=0.95.", metavar=_TARGET)]
NotedTarget = Annotated[str | None, typer.Option(help="Note when this is reached, and train on.", metavar=_TARGET)]
StudyOut = Annotated[str | None, typer.Option(help="The folder for studies/.", show_default="the recipe's out")]
StudyResume = Annotated[
    str | None, typer.Option(help="Go on with what is missing of a study.", metavar="[latest|FOLDER]")
]
Retry = Annotated[bool, typer.Option("--retry", help="With --resume: also what failed.")]
_JOBS = "As jobs of a cluster"
StudyOn = Annotated[str | None, typer.Option(help="A scheduler or site: each point is a job.", rich_help_panel=_JOBS)]
RanksPerNode = Annotated[int | None, typer.Option(help="Ranks on each node.", rich_help_panel=_JOBS)]
JobTime = Annotated[str | None, typer.Option(help="Of each job.", rich_help_panel=_JOBS, show_default="1:00:00")]
Account = Annotated[str | None, typer.Option(help="The account that is charged.", rich_help_panel=_JOBS)]
Queue = Annotated[str | None, typer.Option(help="Queue, partition or QOS.", rich_help_panel=_JOBS)]


@app.command(
    epilog="Examples:\n\n"
    "    tutti scale digits --ranks 1,2,4 --mode weak\n\n"
    "    tutti scale mnist --ranks 1,2,4,8 --mode strong --repeat 3 --target valid_accuracy=0.95\n\n"
    "    tutti scale nbody/short --ranks 4,8,16 --mode weak --on slurm --ranks-per-node 4 --time 30\n\n"
    "    tutti scale --resume runs/studies/digits/2026-11-15_101500_scale_weak"
)
def scale(
    recipe: StudyRecipe = None,
    overrides: Overrides = None,
    ranks: Annotated[str | None, typer.Option(help="The numbers of ranks, as in 1,2,4.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="What stays: the batch of a rank (weak), or of all (strong).")
    ] = None,
    repeat: Annotated[int | None, typer.Option(help="How often, in random order.", show_default="1")] = None,
    steps: Annotated[int | None, typer.Option(help="Speed alone: steps to time.", show_default="100")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps before those that count.", show_default="20")] = None,
    target: StopTarget = None,
    full: Annotated[bool, typer.Option("--full", help="Train the whole recipe.")] = False,
    out: StudyOut = None,
    resume: StudyResume = None,
    retry: Retry = False,
    on: StudyOn = None,
    ranks_per_node: RanksPerNode = None,
    time: JobTime = None,
    account: Account = None,
    queue: Queue = None,
) -> None:
    """Run a recipe on several numbers of ranks, and show how it scales."""
    from tutti.cli import scale as command
    from tutti.cli.studies import Where, wishes_for

    wishes = wishes_for(on, ranks_per_node, time, account, queue)
    asked = command.Asked(recipe, tuple(overrides or ()), ranks, mode, repeat, steps, warmup, target, full)
    command.scale(asked, Where(out, on, wishes), resume, retry)


@app.command(
    epilog="Examples:\n\n"
    "    tutti sweep mnist --set batch.global=64,256,1024 --set schedule.scaling=none,linear,sqrt batch.base=64\n\n"
    "    tutti sweep digits --set optim.lr=1e-3,3e-3 --seeds 3 -n 2 --target valid_accuracy=0.95 --at-once 4\n\n"
    "    tutti sweep digits/mlp --set model.hidden=[64],[128,64]\n\n"
    "    tutti sweep mnist --set 'optim={name: sgd, lr: 0.01},{name: lars, lr: 1.0}' --seeds 3\n\n"
    "    tutti sweep --resume runs/studies/digits/2026-11-15_101500_sweep"
)
def sweep(
    recipe: StudyRecipe = None,
    overrides: Overrides = None,
    axes: Annotated[
        list[str] | None, typer.Option("--set", help="What is varied; may be repeated.", metavar="KEY=VALUE,VALUE")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each combination.", show_default="1")] = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", help="Ranks of each run.", show_default="1")] = None,
    micro: Annotated[int | None, typer.Option(help="The most samples in a pass; more are accumulated.")] = None,
    target: NotedTarget = None,
    skip_impossible: Annotated[
        bool, typer.Option("--skip-impossible", help="Leave out combinations that cannot be.")
    ] = False,
    at_once: Annotated[
        int | None, typer.Option(help="Runs beside each other on this machine; their times suffer.", show_default="1")
    ] = None,
    out: StudyOut = None,
    resume: StudyResume = None,
    retry: Retry = False,
    on: StudyOn = None,
    ranks_per_node: RanksPerNode = None,
    time: JobTime = None,
    account: Account = None,
    queue: Queue = None,
) -> None:
    """Train every combination of some values of a recipe, with several seeds."""
    from tutti.cli import sweep as command
    from tutti.cli.studies import Where, wishes_for

    wishes = wishes_for(on, ranks_per_node, time, account, queue)
    given = (tuple(overrides or ()), tuple(axes or ()), seeds, ranks, micro, target, skip_impossible)
    command.sweep(command.Asked(recipe, *given), Where(out, on, wishes, at_once), resume, retry)


@app.command(
    epilog="Examples:\n\n"
    "    tutti report runs/studies/digits/2026-11-15_101500_scale_weak\n\n"
    "    tutti report runs/studies/a --compare runs/studies/b --out comparison.html\n\n"
    "    tutti report runs/studies/a --collectives runs/bench/collectives/2026-11-15_101500_n4"
)
def report(
    study: Annotated[Path, typer.Argument(help="The folder of a study.")],
    compare: Annotated[Path | None, typer.Option(help="Another study to compare it with.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="An HTML file; pictures go beside it.", show_default="STUDY/report.html")
    ] = None,
    collectives: Annotated[
        Path | None,
        typer.Option(help="Of ranks: a run of tutti bench collectives, to set communication beside.", metavar="RUN"),
    ] = None,
) -> None:
    """Show a study on one page: conclusions, figures, points and conditions; also as PNG, SVG and CSV."""
    from tutti.cli import report as command

    command.report(study, compare, out, collectives)


@app.command(epilog="Examples:\n\n    tutti show mnist optim.lr=0.02\n\n    tutti show mnist -n 8 --plot-lr lr.png")
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    plot_lr: Annotated[Path | None, typer.Option(help="Draw the learning rate of every step into this file.")] = None,
) -> None:
    """Print the resolved configuration, and where each value came from."""
    from tutti.cli import show as command

    command.show(recipe, overrides or [], ranks or 1, plot_lr)


@app.command("list")
def list_parts() -> None:
    """Print the recipes, models, datasets, optimizers, schedules, losses and metrics there are."""
    from tutti.cli import show as command

    command.list_parts()


@app.command(
    epilog="Examples:\n\n"
    "    tutti runs\n\n"
    "    tutti runs mnist --out /scratch/runs\n\n"
    "    tutti runs digits --sort accuracy"
)
def runs(
    recipe: Annotated[str | None, typer.Argument(help="Only the runs of this recipe.")] = None,
    out: Annotated[Path, typer.Option(help="The folder of run folders.")] = Path("runs"),
    sort: Annotated[
        str, typer.Option(help="started, recipe, ranks, batch, time, samples/s, or a metric; the best is last.")
    ] = "started",
) -> None:
    """List run folders with their ranks, epochs, metrics and speed."""
    from tutti.cli import runs as command

    command.list_runs(out, recipe, sort)


@app.command(
    epilog="Examples:\n\n"
    "    tutti compare runs/digits/2026-11-15_101500_n1 runs/digits/2026-11-15_101530_n4\n\n"
    "    tutti compare 2026-11-15_101500_n1 2026-11-15_101530_n4 --plot compare.png"
)
def compare(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or their names as tutti runs prints them.")],
    out: Annotated[Path, typer.Option(help="Where runs are looked for by name.")] = Path("runs"),
    plot: Annotated[Path | None, typer.Option(help="Draw loss and metrics by step and by time into this file.")] = None,
) -> None:
    """Show runs side by side: what differs between them, what came out, where the time went."""
    from tutti.cli import compare as command

    command.compare(runs, out, plot)


@app.command(epilog="Examples:\n\n    tutti board\n\n    tutti board runs/digits --port 7007")
def board(
    folder: Annotated[Path, typer.Argument(help="The folder of run folders, or of a study.")] = Path("runs"),
    port: Annotated[int | None, typer.Option(help="Where it listens.", show_default="the first free from 6006")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the names of the runs and the command.")] = False,
) -> None:
    """Open TensorBoard on runs, each by a name of its recipe, ranks and start."""
    from tutti.cli import board as command

    command.board(folder, port, dry_run)


@app.command(
    epilog="Examples:\n\n"
    "    tutti submit digits --on slurm --nodes 4 --ranks-per-node 4 --time 2:00:00\n\n"
    "    tutti submit nbody/short --on perlmutter --account m1234 --nodes 8 --queue debug --time 30 epochs=3\n\n"
    "    tutti submit digits --on polaris --account datascience --nodes 2 --dry-run"
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
    time: Annotated[str, typer.Option(help="30, 30:00, 2:00:00 or 1-12:00:00.")] = "1:00:00",
    account: Annotated[str | None, typer.Option(help="The account that is charged.")] = None,
    queue: Annotated[str | None, typer.Option(help="Queue, partition or QOS.")] = None,
    constraint: Annotated[str | None, typer.Option(help="What the nodes must be like.")] = None,
    name: Annotated[str | None, typer.Option(help="The job's name.", show_default="the recipe's")] = None,
    directive: Annotated[
        list[str] | None, typer.Option(help="A line for the scheduler in its own words; may be repeated.")
    ] = None,
    max_requeues: Annotated[int, typer.Option(help="How often the run may be started again.")] = 10,
    preflight: Annotated[bool, typer.Option("--preflight", help="Check all ranks before they train.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script and leave nothing behind.")] = False,
) -> None:
    """Submit a recipe to a cluster; it is started again at the end of its time until it is complete."""
    from tutti.cli import submit as command
    from tutti.launch.cluster.resources import Wishes

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
    command.submit(recipe, overrides or [], on, wishes, max_requeues, preflight, dry_run)


Submitted = Annotated[Path | None, typer.Argument(help="A run folder.", show_default="the newest submitted run")]
Runs = Annotated[Path, typer.Option(help="The folder of run folders.")]


@app.command(epilog="Examples:\n\n    tutti status\n\n    tutti status runs/digits/2026-11-15_101500_n8")
def status(
    folder: Annotated[Path | None, typer.Argument(help="A run folder.", show_default="all submitted runs")] = None,
    out: Runs = Path("runs"),
) -> None:
    """Say how submitted runs stand: state, starts, steps, metrics, time left."""
    from tutti.cli import follow as command

    command.status(folder, out)


@app.command(epilog="Examples:\n\n    tutti logs --follow\n\n    tutti logs runs/digits/2026-11-15_101500_n8 --rank 3")
def logs(
    folder: Submitted = None,
    rank: Annotated[int | None, typer.Option(help="One rank's log.", show_default="the job's output")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job has ended.")] = False,
    out: Runs = Path("runs"),
) -> None:
    """Print what a job or one of its ranks has printed."""
    from tutti.cli import follow as command

    command.logs(folder, rank, follow, out)


@app.command(epilog="Example:\n\n    tutti cancel runs/digits/2026-11-15_101500_n8")
def cancel(folder: Annotated[Path, typer.Argument(help="A run folder.")], out: Runs = Path("runs")) -> None:
    """End a submitted run: its ranks save and end, and it is not started again."""
    from tutti.cli import follow as command

    command.cancel(folder, out)


@app.command(hidden=True)
def requeue(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    begin: Annotated[str | None, typer.Option(help="The id of the job that starts.")] = None,
    code: Annotated[int | None, typer.Option(help="The exit code of the ranks.")] = None,
    told: Annotated[bool, typer.Option("--told", help="The job was told to end.")] = False,
) -> None:
    """What a job script does at its beginning and at its end."""
    from tutti.cli import submit as command

    command.requeue(folder, begin, code, told)


@data_app.command(
    epilog="Examples:\n\n    tutti data get mnist\n\n    tutti data get cifar10 --out /scratch/me/cifar10"
)
def get(
    name: Annotated[str, typer.Argument(help="The dataset: mnist or cifar10.")],
    out: Annotated[Path | None, typer.Option(help="The folder for its files.", show_default="data/NAME")] = None,
    mirror: Annotated[str | None, typer.Option("--from", help="Another address to fetch from.")] = None,
) -> None:
    """Download a public dataset, with checksums."""
    from tutti.cli import data as command

    command.get_data(name, out or Path("data") / name, mirror)


@make_app.command(
    epilog="Examples:\n\n"
    "    tutti data make images\n\n"
    "    tutti data make images --out data/small --classes 4 --train 16 --valid 4 --size 64"
)
def images(
    out: Annotated[Path, typer.Option(help="The folder for train/ and validation/.")] = Path("data/imagenet"),
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    train: Annotated[int, typer.Option(help="Training images of each class.")] = 32,
    valid: Annotated[int, typer.Option(help="Validation images of each class.")] = 8,
    size: Annotated[int, typer.Option(help="Pixels of a side, about.")] = 256,
    seed: Annotated[int, typer.Option(help="Another seed, other images.")] = 0,
) -> None:
    """Draw images of striped discs as a tree of JPEG files, like ImageNet's; their classes can be learned."""
    from tutti.cli import data as command

    command.make_images(out, classes, train, valid, size, seed)


@make_app.command(
    epilog="Examples:\n\n"
    "    tutti data make nbody --out data/nbody/train.h5 --box 256 --seed 1\n\n"
    "    tutti data make nbody --out data/nbody/valid.h5 --box 128 --seed 2\n\n"
    "    tutti data make nbody --out /scratch/me/train.h5 --box 1024 --memory-gib 64 --device cuda"
)
def nbody(
    out: Annotated[Path, typer.Option(help="The HDF5 file; a picture is put beside it.")] = Path("data/nbody/train.h5"),
    box: Annotated[int, typer.Option(help="Cells along a side, an even number.")] = 256,
    seed: Annotated[int, typer.Option(help="Another seed, another universe.")] = 1,
    cell: Annotated[float | None, typer.Option(help="Length of a cell in Mpc/h.", show_default="0.1")] = None,
    memory_gib: Annotated[float, typer.Option(help="Memory to use; what does not fit goes to disk.")] = 2.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file of that name.")] = False,
) -> None:
    """Make a box of matched N-body and hydro fields, with a picture of its slices."""
    from tutti.cli import data as command

    command.make_nbody(out, box, cell, seed, memory_gib, device, overwrite)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(f"tutti {tutti.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; a user's mistake is one message and exit code 2."""
    try:
        app(args=fill_resume(sys.argv[1:]), prog_name="tutti")
    except TuttiError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def fill_resume(arguments: list[str]) -> list[str]:
    """`--resume` alone means `--resume latest`."""
    filled = []
    for word, following in zip(arguments, [*arguments[1:], "-"], strict=True):
        filled.append(word)
        if word == "--resume" and (following.startswith("-") or "=" in following):
            filled.append("latest")
    return filled
