"""`tutti train` and `tutti run`: start ranks, or be one."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tutti.checkpoint.manifest import find_latest
from tutti.config.framework import keras_backend
from tutti.config.load import Resolved, resolve
from tutti.config.run import RunConfig
from tutti.errors import CheckpointError, Interrupted, LaunchError, TuttiError
from tutti.launch import local
from tutti.launch.failure import Failure, describe, leave_note, quote
from tutti.launch.nursery import keep, open_nursery
from tutti.launch.parents import end_with_parent
from tutti.launch.threads import threads_per_rank
from tutti.records.folder import RunFolder, check_writable, create_folder, write_config
from tutti.records.record import Record
from tutti.records.runs import find_runs, read_state
from tutti.runtime.discovery import discover
from tutti.runtime.placement import Placement

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what its sockets say of a missing rank is told in words


def train(recipe: str, overrides: list[str], ranks: int | None, resume: str | None, preflight: bool = False) -> None:
    """Train a recipe on ranks started here, or as one of those already started."""
    placement = place(ranks)
    local.make_importable(recipe)
    folder, checkpoint = None, None
    if (Path(recipe) / "config.yaml").is_file():
        folder, checkpoint = begun_run(Path(recipe), resume)
        if read_state(folder) == "finished":
            if placement.rank == 0:
                print(f"the run in {folder.path} is finished: nothing is left to do")
            return
        config = resolve(str(folder.config), overrides).config
    else:
        config = resolve(recipe, overrides).config
        if resume is not None:
            checkpoint = find_checkpoint(resume, config.out, config.recipe)
            config = _resumed(recipe, checkpoint, overrides).config
    if ranks is None or ranks == 1 or _is_rank(placement):
        _train_as_rank(config, placement, folder or _given_folder(), checkpoint, preflight)
        return
    open_nursery(_needs(config), threads_per_rank(ranks, os.environ, config.runtime.threads))
    check(config, ranks)
    more = []
    if checkpoint:
        folder = RunFolder(checkpoint.parent.parent)
        more = [*overrides, "--resume", str(checkpoint)]
    elif folder:
        more = [*overrides]
    else:
        check_writable(config.out)
        folder = create_folder(config.out, config.recipe, ranks)
        write_config(folder, config.as_yaml())
    more += ["--preflight"] if preflight else []
    arguments = ["-m", "tutti", "train", str(folder.config), *more]
    finish(folder, local.start_ranks(ranks, arguments, folder, config.runtime.threads, forked=True))


def run(script: str, arguments: list[str], ranks: int | None, out: str) -> None:
    """Run a script on ranks started here, or as one of those already started."""
    from tutti.runtime.script import check_script, run_script

    placement = place(ranks)
    check_script(script)
    if _is_rank(placement) or ranks in (None, 1):
        folder = _given_folder()
        _as_rank(placement, lambda: run_script(script, arguments, placement, folder))
        return
    check_writable(out)
    folder = create_folder(out, Path(script).stem, ranks)
    failure = local.start_ranks(ranks or 1, ["-m", "tutti", "run", script, *arguments], folder)
    if failure is None:
        print(f"run folder: {folder.path}")
    finish(folder, failure)


def begun_run(path: Path, resume: str | None) -> tuple[RunFolder, Path | None]:
    """A run folder to go on in, and its newest checkpoint if it has come to one."""
    if resume is not None:
        raise CheckpointError(f"--resume {resume}: the run in {path} goes on from its newest checkpoint. Leave it out.")
    folder = RunFolder(path)
    has_saved = (folder.checkpoints / "latest").is_file()
    return folder, find_latest(folder.checkpoints) if has_saved else None


def find_checkpoint(resume: str, out: str, recipe: str) -> Path:
    """The checkpoint that `--resume` means: of the newest run, of a run folder, or itself."""
    if resume == "latest":
        for run in reversed(find_runs(Path(out), recipe)):
            if (run.folder.checkpoints / "latest").is_file():
                return find_latest(run.folder.checkpoints)
        raise CheckpointError(
            f"no run of {recipe!r} in {out!r} has a checkpoint. Start one with: tutti train {recipe}, "
            "or give the path of a run folder or of a checkpoint."
        )
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"--resume {resume}: no such folder. Give a run folder or one of its checkpoints/step-*.")
    if (path / "checkpoints").is_dir():
        return find_latest(path / "checkpoints")
    if not (path.parent.parent / "config.yaml").is_file():
        raise CheckpointError(f"--resume {resume} is neither a run folder nor a checkpoint inside one.")
    return path


def _resumed(recipe: str, checkpoint: Path, overrides: list[str]) -> Resolved:
    """A run's own configuration, with new overrides; the recipe asked for must be the one it was made with."""
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


def place(ranks: int | None) -> Placement:
    """Who this process is among ranks; `-n` is for those that nobody has started yet."""
    if ranks is not None:
        local.check_ranks(ranks)
    placement = discover(os.environ)
    if ranks not in (None, placement.world_size) and placement.world_size > 1:
        raise LaunchError(
            f"-n {ranks}, but {placement.launcher} has already started {placement.world_size} ranks. "
            "Leave out -n under a launcher."
        )
    return placement


def _is_rank(placement: Placement) -> bool:
    return placement.world_size > 1 or local.FOLDER_VARIABLE in os.environ


def _given_folder() -> RunFolder | None:
    path = os.environ.get(local.FOLDER_VARIABLE)
    return RunFolder(Path(path)) if path else None


def _train_as_rank(
    config: RunConfig, placement: Placement, folder: RunFolder | None, checkpoint: Path | None, preflight: bool
) -> None:
    if _given_folder():
        end_with_parent()

    def work() -> Any:
        outcome = _run_rank(config, placement, folder, checkpoint, preflight)
        if placement.rank == 0:
            from tutti.report.curves import draw_curves

            print(f"curves:     {draw_curves(outcome.folder)}\nrun folder: {outcome.folder.path}", flush=True)
        return outcome

    _as_rank(placement, work)


def _needs(config: RunConfig) -> list[str]:
    """The modules that every rank of a run will import."""
    if config.framework == "torch":
        return ["tutti.train.run", "torch._dynamo"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read by TensorFlow when it is imported
    on_tensorflow = config.framework == "tensorflow" or keras_backend(config) == "tensorflow"
    return ["torch", "tensorflow"] if on_tensorflow else ["torch"]


def check(config: RunConfig, ranks: int, here: int | None = None) -> None:
    """Refuse what is wrong before ranks are started, all on this host unless it is told how many."""
    if config.framework == "torch":
        from tutti.runtime.device import check_gpus
        from tutti.train.check import check_parts

        check_gpus(config.runtime, here or ranks)
    else:
        from tutti.frameworks.check import check_parts
    check_parts(config, ranks)


def _run_rank(
    config: RunConfig, placement: Placement, folder: RunFolder | None, checkpoint: Path | None, preflight: bool
) -> Any:
    """Train in the framework of the recipe; what the run came to."""
    if config.framework == "torch":
        from tutti.train.run import run_rank

        return run_rank(config, placement, folder, checkpoint, preflight=preflight)
    from tutti.frameworks.run import run_rank as run_in_keras

    return run_in_keras(config, placement, folder, checkpoint, preflight)


def _as_rank(placement: Placement, work: Callable[[], Any]) -> None:
    """Do a rank's work; its failure is told to the launcher that started it, or on the screen."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        outcome = work()  # kept to the end: what is freed may wait for threads
        if local.NOTES_VARIABLE in os.environ and not keep(outcome):
            _leave(0)
        del outcome
    except TuttiError as error:
        silent = error.told or (error.agreed and placement.rank > 0)
        _tell(describe(placement.rank, error, error.exit_code, said=True), silent)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _tell(describe(placement.rank, error, 1, said=False))


def _tell(failure: Failure, silent: bool = False) -> None:
    """Tell the launcher that started this rank, or whoever looks at the screen; then end."""
    notes = os.environ.get(local.NOTES_VARIABLE)
    who = f"rank {failure.rank} on host {failure.host}"
    if notes:
        leave_note(Path(notes), failure)
    elif failure.said:
        if not silent:
            print(failure.sentence(), file=sys.stderr)
    elif failure.consequence:
        print(f"error: {who} ends: it lost contact with another rank ({failure.text})", file=sys.stderr)
    else:
        lines = traceback.format_exc().splitlines()[-12:]
        print(f"error: {who} failed: {failure.text}. Its last calls:{quote(lines)}", file=sys.stderr)
    _leave(failure.exit_code)


def _leave(exit_code: int) -> None:
    """End this rank at once: nothing is left to do, and threads of torch may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def terminate(*_: Any) -> None:
    """Serves as a signal handler."""
    raise KeyboardInterrupt


def finish(folder: RunFolder, failure: Failure | None) -> None:
    """The launcher's last word."""
    if failure is None:
        return
    print(failure.message(folder), file=sys.stderr)
    if folder.record.exists() and failure.exit_code != Interrupted.exit_code:
        with contextlib.suppress(OSError):
            Record.open(folder.record).end("failed", failure=failure.text)
    if folder.path.exists():
        print(f"run folder: {folder.path}", file=sys.stderr)
    sys.exit(failure.exit_code)
