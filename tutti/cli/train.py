"""`tutti train`: train a recipe on ranks that are started here, or as one rank."""

import functools
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tutti.checkpoint.manifest import find_checkpoint
from tutti.cli.options import Overrides, Preflight, Ranks, ResumeCommand, complete_recipe, examples
from tutti.cli.ranks import as_rank, begun_run, check, finish, given_folder, is_rank, place, warn_once
from tutti.config.check import check_init, is_reached
from tutti.config.framework import keras_backend
from tutti.config.load import Resolved, resolve
from tutti.config.plan import make_plan
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import Cause, CheckpointError, ConfigError, Interrupted, OutOfMemory
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.failures import NOTES_VARIABLE
from tutti.ranks.placement import Placement
from tutti.ranks.process import end_with_parent
from tutti.runs.folder import RunFolder, check_writable, create_folder, write_config
from tutti.runs.record import PREDICTED_VARIABLE, SEGMENTS_VARIABLE, Record, count_segments, read_record, state_of

app = typer.Typer()


@app.command(
    cls=ResumeCommand,
    epilog=examples(
        "tutti train digits -n 2",
        "tutti train mnist -n 4 optim.lr=0.02 epochs=3",
        "mpirun -np 4 tutti train digits",
        "tutti train digits -n 4 --resume",
        "tutti train runs/digits/2026-11-15_101500_n4 -n 2",
        "tutti train digits --min-ranks 2 --max-ranks 4",
    ),
)
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name (mnist, mnist/large_batch), the path of a YAML file, or the FOLDER of a run.",
            metavar="RECIPE|FOLDER",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Overrides = None,
    ranks: Ranks = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Resume the newest run (latest), a run folder or a checkpoint.", metavar="[latest|PATH]"),
    ] = None,
    preflight: Preflight = False,
    min_ranks: Annotated[int | None, typer.Option(help="Elastic: continue while this many ranks are left.")] = None,
    max_ranks: Annotated[int | None, typer.Option(help="Elastic: add new ranks up to this number.")] = None,
    join: Annotated[
        str | None, typer.Option(help="Elastic: offer -n ranks to a running job.", metavar="HOST:PORT")
    ] = None,
    wait: Annotated[float, typer.Option(help="Elastic: seconds to wait while there are too few ranks.")] = 300.0,
    pause: Annotated[float, typer.Option(help="Elastic: seconds before a lost rank is restarted.")] = 10.0,
) -> None:
    """Train a recipe, on ranks started here or as one of the ranks that mpirun or srun has started."""
    if min_ranks is None and max_ranks is None and join is None:
        _train(recipe, overrides or [], ranks, resume, preflight)
        return
    from tutti.cli import elastic

    if preflight:
        raise ConfigError("--preflight is for a fixed number of ranks: leave it out with --min-ranks and --max-ranks.")
    asked = elastic.ElasticRequest(ranks, min_ranks, max_ranks, join, resume, wait, pause)
    elastic.train(recipe, overrides or [], asked)


def _train(recipe: str, overrides: list[str], ranks: int | None, resume: str | None, preflight: bool) -> None:
    """Train a recipe on a fixed number of ranks."""
    placement = place(ranks)
    make_importable(recipe)
    folder, checkpoint, seen = None, None, 0
    if (Path(recipe) / "config.yaml").is_file():
        seen = count_segments(RunFolder(Path(recipe)).record)  # before the checkpoint is chosen
        folder, checkpoint = begun_run(Path(recipe), resume)
        config = resolve(str(folder.config), overrides).config
        if config.script is not None:
            raise ConfigError(
                f"the run in {folder.path} was trained by the script {config.script}, in a loop of its own: expected a "
                f"run of a recipe. Start {config.resume_line(folder.path)}"
            )
        if is_finished(folder, checkpoint, config, overrides, ranks or placement.world_size):
            if placement.rank == 0:
                print(f"the run in {folder.path} is finished: nothing is left to do")
            return
    else:
        config = resolve(recipe, overrides).config
        if resume is not None:
            checkpoint = find_checkpoint(resume, config.out, config.recipe, warn_once)
            seen = count_segments(RunFolder(checkpoint.parent.parent).record)
            config = _resumed(recipe, checkpoint, overrides).config
    if ranks is None or ranks == 1 or is_rank(placement):
        _train_as_rank(config, placement, folder or given_folder(), checkpoint, preflight)
        return
    from tutti.launch.local import interrupted_at_start, start_fork_server, start_ranks

    start_fork_server(find_needs(config), threads_per_rank(ranks, os.environ, config.runtime.threads))
    check(config, ranks)
    if checkpoint is None:
        check_init(config)
    _foresee_memory(config, ranks, ranks)
    more = [*overrides] if folder else []
    if checkpoint:
        folder = RunFolder(checkpoint.parent.parent)
        more = [*overrides, "--resume", str(checkpoint)]
    more += ["--preflight"] if preflight else []
    os.environ[SEGMENTS_VARIABLE] = str(seen)
    from tutti.train.memory import count_kills

    kills = count_kills()
    try:
        if folder is None:
            check_writable(config.out)
            folder = create_folder(config.out, config.recipe, ranks)
            write_config(folder, config.as_yaml())
        arguments = ["-m", "tutti", "train", str(folder.config), *more]
        failure = start_ranks(ranks, arguments, folder, config.runtime.threads, forked=True, saves=True)
    except KeyboardInterrupt:
        if folder is None:
            raise
        failure = interrupted_at_start(folder, saves=True)
    if failure is not None and failure.cause == Cause.RANK_LOST and not failure.said and count_kills() > kills:
        text = f"rank {failure.rank} on host {failure.host} was killed by the kernel, which had no memory left."
        failure = replace(failure, cause=Cause.OUT_OF_MEMORY, text=text, said=True)
    memory = {}
    if failure is not None and failure.cause == Cause.OUT_OF_MEMORY:
        text, memory = _advise(config, failure.text, ranks, ranks)
        failure = replace(failure, text=text)
    finish(folder, failure, memory)


def _foresee_memory(config: RunConfig, ranks: int, local_size: int) -> None:
    """Warn where ranks would need more memory than they have; what was predicted is for the record of rank 0."""
    from tutti.memory.estimate import could_matter

    os.environ.pop(PREDICTED_VARIABLE, None)
    if not could_matter(config, ranks, local_size):
        return
    from tutti.memory.warning import foresee

    if (found := foresee(config, ranks, local_size)) is not None:
        os.environ[PREDICTED_VARIABLE] = str(found.peak_bytes)
        if found.text:
            print(found.text, file=sys.stderr, flush=True)


def _advise(config: RunConfig, text: str, ranks: int, local_size: int) -> tuple[str, dict[str, int]]:
    """The message of a rank that has run out of memory with what to set, and what is predicted for the record."""
    from tutti.memory.warning import advise

    found = advise(config, ranks, local_size)
    if found is None:
        return f"{text} Lower the batch of a rank, or start more ranks.", {}
    return f"{text} {found.text[0].upper()}{found.text[1:]}", {"predicted_peak_bytes": found.peak_bytes}


def is_finished(
    folder: RunFolder, checkpoint: Path | None, config: RunConfig, overrides: list[str], ranks: int
) -> bool:
    """Return whether nothing is left to do for a run; more epochs or steps extend one that has ended.

    Other overrides would have no effect on a run that has ended, and are refused.
    """
    record = read_record(folder.record) or {}
    if state_of(record) != "finished":
        return False
    if config == resolve(str(folder.config)).config:
        return True
    samples = (record.get("plan") or {}).get("train_samples")
    total = make_plan(config, ranks, samples).total_steps if samples else sys.maxsize
    is_reached_now = config.stop_at is not None and is_reached(config.stop_at, record.get("results") or {})
    if checkpoint is not None and not is_reached_now and total > int(record.get("step") or 0):
        return False
    why = "it has no checkpoint to continue from" if checkpoint is None else f"it has ended by {record.get('ended_by')}"
    raise ConfigError(
        f"the run in {folder.path} is finished after step {record.get('step'):,}, and {why}: {' '.join(overrides)} "
        f"would have no effect. Extend it with a larger epochs= or max_steps=, or start a new run with: "
        f"tutti train {config.recipe} {' '.join(overrides)}"
    )


def _resumed(recipe: str, checkpoint: Path, overrides: list[str]) -> Resolved:
    """The configuration of a run with new overrides; the given recipe must be the one of the run."""
    asked = resolve(recipe).config.recipe
    kept = str(checkpoint.parent.parent / "config.yaml")
    own, framework = resolve(kept, overrides), resolve(kept).config.framework
    if (own.config.framework == "torch") != (framework == "torch"):
        raise CheckpointError(
            f"checkpoint {checkpoint} was made with framework={framework}, which framework={own.config.framework} "
            f"cannot read. Set framework={framework}, or leave it out."
        )
    if own.config.recipe != asked:
        raise CheckpointError(
            f"checkpoint {checkpoint} is of recipe {own.config.recipe!r} (model {own.config.model.name}), "
            f"not of {asked!r}. Resume it with: tutti train {own.config.recipe} --resume {checkpoint}"
        )
    return own


def _train_as_rank(
    config: RunConfig, placement: Placement, folder: RunFolder | None, checkpoint: Path | None, preflight: bool
) -> None:
    if given_folder():
        end_with_parent()

    def work() -> Any:
        outcome = _run_advised(config, placement, folder, checkpoint, preflight)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # the run is finished, whatever comes now
            signal.signal(number, signal.SIG_IGN)
        if placement.rank == 0:
            from tutti.report.curves import draw_curves

            print(f"curves:     {draw_curves(outcome.folder)}\nrun folder: {outcome.folder.path}", flush=True)
        return outcome

    def stopped(name: str) -> Interrupted:
        if folder and (step := _own_last_step(folder)):
            return Interrupted(f"stopped on {name} when the run had ended, after step {step:,}. See {folder.record}.")
        again = f"Resume with: tutti train {folder.path}" if folder else "Start it again with the same command."
        return Interrupted(f"stopped on {name} before the first step: there was nothing to save. {again}")

    as_rank(placement, work, stopped)


def _run_advised(
    config: RunConfig, placement: Placement, folder: RunFolder | None, checkpoint: Path | None, preflight: bool
) -> Any:
    """Train as a rank; one that has no launcher says itself what to do about its memory."""
    if NOTES_VARIABLE in os.environ:
        return _run_rank(config, placement, folder, checkpoint, preflight)
    if placement.rank == 0:
        _foresee_memory(config, placement.world_size, placement.local_size)
    try:
        return _run_rank(config, placement, folder, checkpoint, preflight)
    except OutOfMemory as error:
        traceback.clear_frames(error.__traceback__)  # the prediction needs some of what they hold
        advised = error
    text, memory = _advise(config, str(advised), placement.world_size, placement.local_size)
    advised.args = (text,)
    if placement.rank == 0 and advised.record is not None:
        record = Record.open(advised.record)
        record.note_memory(**memory)
        record.content["failure"] = text.partition("\n")[0]
        record.write()
    raise advised


def _own_last_step(folder: RunFolder) -> int | None:
    """The last step of a run that this process has recorded as ended."""
    record = read_record(folder.record) or {}
    last = (record.get("segments") or [{}])[-1]
    is_ended = last.get("process") == os.getpid() and last.get("state", "running") != "running"
    return record.get("step") if is_ended else None


def find_needs(config: RunConfig) -> list[str]:
    """The modules that every rank of a run imports."""
    if config.framework == "torch":
        return ["tutti.train.torch", "torch._dynamo"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read by TensorFlow when it is imported
    on_tensorflow = config.framework == "tensorflow" or keras_backend(config) == "tensorflow"
    return ["torch", "triton", "tensorflow"] if on_tensorflow else ["torch"]  # in the other order Triton crashes


def _run_rank(
    config: RunConfig, placement: Placement, folder: RunFolder | None, checkpoint: Path | None, preflight: bool
) -> Any:
    """Train in the framework of the recipe; returns the result of the run."""
    from tutti.train.run import run_rank

    examine = None
    if preflight:
        from tutti.doctor.run import preflight as check_ranks

        examine = functools.partial(check_ranks, placement, config, folder.path if folder else Path(config.out))
    return run_rank(find_framework(config), config, placement, folder, checkpoint, examine)


def find_framework(config: RunConfig) -> Any:
    """The framework of a recipe, imported."""
    if config.framework == "torch":
        from tutti.train.torch import TorchFramework

        return TorchFramework()
    from tutti.frameworks.run import KerasFramework

    return KerasFramework()
