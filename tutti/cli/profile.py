"""`tutti profile`: trace steps of a recipe on every rank, or the operations of a script that uses Horovod's API."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tutti import units
from tutti.bench.trace.horovod import read_tensors, read_timeline, write_horovod_summary
from tutti.bench.trace.summary import DEFAULT_STEPS, TracedSteps, parse_steps
from tutti.cli.options import Ranks, complete_recipe, examples
from tutti.cli.ranks import as_rank, finish, is_rank, on_ranks, place
from tutti.config.load import resolve
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.horovod.script import check_script, run_script
from tutti.launch import local
from tutti.ranks.placement import Placement
from tutti.runs.files import write_durably
from tutti.runs.folder import RunFolder, check_writable, create_folder

_OUT = "runs"
_VARIABLE = "HOROVOD_TIMELINE"

app = typer.Typer()


class RecipeOrScript(TyperCommand):
    """A command whose options may follow a recipe, while everything after a script belongs to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = not any(word.endswith(".py") and "=" not in word for word in args)
        return super().parse_args(ctx, args)


@app.command(
    cls=RecipeOrScript,
    epilog=examples(
        "tutti profile digits -n 2 --steps 20:25",
        "nsys profile -c cudaProfilerApi tutti profile nbody/short --steps 50:55",
        "tutti profile -n 2 horovod_script.py --epochs 1",
    ),
)
def profile(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe, or a Python script that uses Horovod's API.", autocompletion=complete_recipe),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value; for a script, its arguments.")] = None,
    ranks: Ranks = None,
    steps: Annotated[str | None, typer.Option(help="FIRST:LAST, the steps to trace.", show_default="20:25")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also trace memory allocations.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Also trace the Python calls of each operator.")] = False,
) -> None:
    """Trace steps on every rank: one timeline of all ranks for Perfetto, and a summary of where the time goes."""
    overrides = overrides or []
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported: no messages of its profiler
    if recipe.endswith(".py"):
        _refuse_for_scripts(steps, memory, stacks)
        _profile_script(recipe, overrides, ranks)
        return
    asked = TracedSteps(*parse_steps(DEFAULT_STEPS if steps is None else steps), memory, stacks)
    make_importable(recipe)
    config = resolve(recipe, overrides).config
    _check_framework(config, ["tutti train", recipe, *overrides], asked)
    if not is_rank(place(ranks)):
        _check_end(config, ranks or 1, asked)

    def work(placement: Placement, folder: RunFolder | None) -> None:
        from tutti.bench.trace.profile import profile_rank

        profile_rank(config, asked, placement, folder)

    on_ranks("profile", config, ranks, ["tutti.bench.trace.profile"], work)


def _check_framework(config: RunConfig, words: list[str], asked: TracedSteps) -> None:
    if config.framework != "torch":
        raise ConfigError(
            f"framework={config.framework}: tutti profile traces torch. TensorFlow's own profiler traces these steps "
            f"with: {' '.join(words)} log.profile=[{asked.first},{asked.last}]"
        )


def _check_end(config: RunConfig, ranks: int, asked: TracedSteps) -> None:
    """Refuse steps beyond the end, if the number of samples is known before ranks start."""
    from tutti.config.plan import make_plan

    samples = config.data.train_samples()
    if samples is not None:
        asked.check_end(make_plan(config, ranks, samples).total_steps)


def _refuse_for_scripts(steps: str | None, memory: bool, stacks: bool) -> None:
    given = [name for name, value in (("--steps", steps), ("--memory", memory), ("--stacks", stacks)) if value]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: for a recipe. A script has the timeline of all its operations: leave it out."
        )


def _profile_script(script: str, arguments: list[str], ranks: int | None) -> None:
    """Run a script as `tutti run` does, and print a summary of its timeline."""
    placement = place(ranks)
    check_script(script)
    check_writable(_OUT)
    if is_rank(placement):
        as_rank(placement, lambda: _run_as_rank(script, arguments, placement))
        return
    folder = _open_folder(script, ranks or 1)
    failure = local.start_ranks(ranks or 1, ["-m", "tutti", "run", script, *arguments], folder)
    finish(folder, failure)
    _report(script, folder, ranks or 1)


def _run_as_rank(script: str, arguments: list[str], placement: Placement) -> None:
    """Run as one of the ranks that mpirun or srun has started; rank 0 writes the timeline."""
    folder = _open_folder(script, placement.world_size) if placement.rank == 0 else None
    run_script(script, arguments, placement, folder)
    if folder:
        _report(script, folder, placement.world_size)


def _open_folder(script: str, ranks: int) -> RunFolder:
    """Create the folder of the timeline, and set its path for rank 0 in the environment."""
    folder = create_folder(_OUT, f"profile/{Path(script).stem}", ranks)
    folder.checkpoints.rmdir()
    os.environ[_VARIABLE] = str(_timeline(folder).absolute())
    return folder


def _timeline(folder: RunFolder) -> Path:
    return folder.path / "timeline.json"


def _report(script: str, folder: RunFolder, ranks: int) -> None:
    path = _timeline(folder)
    tensors = read_tensors(read_timeline(path)) if path.exists() else []
    if not tensors:
        raise ConfigError(
            f"{script} left no operation in a timeline: expected a script that calls hvd.init() and operations of "
            f"horovod or tutti.horovod. What it printed is in {folder.logs}."
        )
    text = write_horovod_summary(f"{script} on {units.count(ranks, 'rank')}", tensors)
    write_durably(folder.path / "summary.txt", text)
    print(f"\n{text}\ntimeline:   {path} (open it at https://ui.perfetto.dev)\nrun folder: {folder.path}", flush=True)
