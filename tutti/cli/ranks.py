"""Code that the commands with ranks share: start ranks or run as one, and report failures."""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tutti.checkpoint.manifest import find_latest, saved
from tutti.config.check import check_parts
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import Cause, CheckpointError, FolderError, Interrupted, LaunchError, TuttiError
from tutti.launch.local import keep_until_exit, start_fork_server
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.environments import discover
from tutti.ranks.failures import NOTES_VARIABLE, Failure, describe, leave_note, name_signal, quote
from tutti.ranks.placement import Placement
from tutti.ranks.process import FOLDER_VARIABLE, end_with_parent
from tutti.runs.folder import RunFolder, check_writable, create_folder, owned, read_script_runs
from tutti.runs.output import lasting_output
from tutti.runs.record import Record, python_path, read_record

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # tutti reports missing ranks itself


def place(ranks: int | None) -> Placement:
    """Find this process's place among the ranks; `-n` is only for ranks that no launcher has started."""
    if ranks is not None:
        from tutti.launch.local import check_ranks

        check_ranks(ranks)
    placement = discover(os.environ)
    if ranks not in (None, placement.world_size) and placement.world_size > 1:
        raise LaunchError(
            f"-n {ranks}, but {placement.launcher} has already started {placement.world_size} ranks. "
            "Leave out -n under a launcher."
        )
    return placement


def is_rank(placement: Placement) -> bool:
    """Returns whether a launcher has started this process as a rank."""
    return placement.world_size > 1 or FOLDER_VARIABLE in os.environ


def given_folder() -> RunFolder | None:
    """The run folder that the launcher has created for its ranks."""
    path = os.environ.get(FOLDER_VARIABLE)
    return RunFolder(Path(path)) if path else None


def begun_run(path: Path, resume: str | None) -> tuple[RunFolder, Path | None]:
    """A run folder to resume, and its newest checkpoint if it has one."""
    if resume is not None:
        raise CheckpointError(f"--resume {resume}: the run in {path} resumes from its newest checkpoint. Leave it out.")
    folder = RunFolder(path)
    make_importable(str(path), python_path(read_record(folder.record) or {}))
    has_saved = (folder.checkpoints / "latest").is_file() or saved(folder.checkpoints)
    return folder, find_latest(folder.checkpoints, warn_once) if has_saved else None


def warn_once(text: str) -> None:
    """Print a warning that every rank has, on the first of them."""
    if discover(os.environ).rank == 0 and FOLDER_VARIABLE not in os.environ:
        print(text, file=sys.stderr)


def check(config: RunConfig, ranks: int, here: int | None = None) -> None:
    """Check a configuration before ranks are started; all ranks are on this host unless `here` is given."""
    if config.framework == "torch":
        from tutti.ranks.device import check_gpus

        check_gpus(config.runtime, here or ranks)
    check_parts(config, ranks, here)


def on_ranks(
    kind: str,
    config: RunConfig,
    ranks: int | None,
    needs: Sequence[str],
    work: Callable[[Placement, RunFolder | None], Any],
) -> None:
    """Do a command's work as one rank, or start ranks with the same command line.

    The folder of the results is `out/KIND/RECIPE/...`; it is created here for ranks that are started here, otherwise
    by rank 0.
    """
    placement = place(ranks)
    folder = given_folder()
    if ranks in (None, 1) or is_rank(placement):
        if folder:
            end_with_parent()
        as_rank(placement, lambda: work(placement, folder))
        return
    assert ranks is not None
    start_fork_server(needs, threads_per_rank(ranks, os.environ, config.runtime.threads))
    check_writable(config.out)
    from tutti.launch.local import start_ranks
    from tutti.ranks.device import check_gpus

    check_gpus(config.runtime, ranks)
    folder = create_folder(config.out, f"{kind}/{config.recipe}", ranks)
    arguments = ["-m", "tutti", *sys.argv[1:]]
    finish(folder, start_ranks(ranks, arguments, folder, config.runtime.threads, forked=True))


def without_folder(
    config: RunConfig,
    ranks: int | None,
    placement: Placement,
    needs: Sequence[str],
    work: Callable[[Placement], Any],
) -> None:
    """Do a command's work as one rank, or start ranks with the same command line; no folder of results is left."""
    if ranks in (None, 1) or is_rank(placement):
        if given_folder():
            end_with_parent()
        as_rank(placement, lambda: work(placement))
        return
    assert ranks is not None
    start_fork_server(needs, threads_per_rank(ranks, os.environ, config.runtime.threads))
    check(config, ranks)
    from tutti.launch.local import start_ranks

    with tempfile.TemporaryDirectory(prefix="tutti-ranks-") as path:
        folder = RunFolder(Path(path))
        folder.logs.mkdir()
        failure = start_ranks(ranks, ["-m", "tutti", *sys.argv[1:]], folder, config.runtime.threads, forked=True)
        if failure is not None:
            print(failure.message(folder), file=sys.stderr)
            sys.exit(failure.exit_code)


def as_rank(placement: Placement, work: Callable[[], Any], stopped: Callable[[str], TuttiError] | None = None) -> None:
    """Do a rank's work, and report a failure to the launcher that started it, or on the screen.

    `stopped` makes the error of a rank that a signal, given by its name, has ended before it could do better.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if stopped else (signal.SIGTERM,):
        signal.signal(number, terminate)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with lasting_output():
            outcome = work()  # kept until the process ends: freeing it may wait for threads
        if NOTES_VARIABLE in os.environ and not keep_until_exit(outcome):
            leave(0)
        del outcome
    except TuttiError as error:
        silent = error.told or (error.agreed and placement.rank > 0)
        _report(describe(placement.rank, error, error.exit_code, said=True), silent)
    except KeyboardInterrupt as interrupt:
        error = _error_behind(interrupt) or (
            stopped(interrupt.args[0] if interrupt.args else "SIGINT") if stopped else None
        )
        if error is None:
            sys.exit(130)
        _report(describe(placement.rank, error, error.exit_code, said=True), silent=placement.rank > 0)
    except Exception as error:
        _report(describe(placement.rank, error, 1, said=False))


def _error_behind(interrupt: KeyboardInterrupt) -> TuttiError | None:
    """The error with which the rank was about to end when another signal came: the launcher forwards those it gets."""
    behind = interrupt.__context__
    while behind is not None and not isinstance(behind, TuttiError):
        behind = behind.__context__
    return behind


def _report(failure: Failure, silent: bool = False) -> None:
    """Report a failure to the launcher that started this rank, or on the screen, and end."""
    notes = os.environ.get(NOTES_VARIABLE)
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
    leave(failure.exit_code)


def leave(exit_code: int) -> None:
    """End this rank at once: threads of torch may wait for ranks that have ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def terminate(number: int, _: Any) -> None:
    """Signal handler that ends the process as Ctrl-C does."""
    raise KeyboardInterrupt(name_signal(number))


def finish(folder: RunFolder, failure: Failure | None, memory: Mapping[str, int] | None = None) -> None:
    """Print and record the failure of a run, with what is known of its memory, and end with its exit code."""
    if failure is None:
        return
    print(failure.message(folder), file=sys.stderr)
    running = [each for each in read_script_runs(folder) if (read_record(each.record) or {}).get("state") == "running"]
    with contextlib.suppress(OSError, FolderError):
        _record_end(running[-1] if running else folder, failure, memory or {})
    print_folders(folder, sys.stderr)
    sys.exit(failure.exit_code)


def print_folders(folder: RunFolder, file: TextIO | None = None) -> None:
    """Name the run folder, or those of a script whose runs are in others, and where the logs of its ranks are."""
    others = read_script_runs(folder)
    own = [folder] if folder.record.exists() or (folder.path.exists() and not others) else []
    for run in own + others:
        print(f"run folder: {run.path}", file=file)
    if others:
        print(f"logs of the script: {folder.logs}", file=file)


def _record_end(folder: RunFolder, failure: Failure, memory: Mapping[str, int]) -> None:
    """Record a failure, unless another process trains in the folder; of a run that was stopped, only if no rank has."""
    if not (folder.record.exists() or folder.study.exists()):
        return
    with owned(folder, watch_seconds=0):
        record = Record.open(folder.record)
        is_stopped = failure.cause == Cause.INTERRUPTED or failure.exit_code == Interrupted.exit_code
        if is_stopped and record.content.get("state") != "running":
            return
        where: dict[str, Any] = {"failed_rank": failure.rank, "failed_host": failure.host}
        if failure.said:
            where = {} if failure.lost_rank is None else {"failed_rank": failure.lost_rank}
        state = "interrupted" if is_stopped else "failed"
        record.note_memory(**memory)
        record.end(state, failure=failure.text.partition("\n")[0], cause=failure.cause, **where)


class StatusLine:
    """Shows on a terminal what is being measured; drawn only on changes, so that no thread disturbs a measurement."""

    def __init__(self, placement: Placement) -> None:
        live = placement.rank == 0 and placement.launcher in ("none", "torchrun") and sys.stdout.isatty()
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(file=sys.stdout)  # not redirected yet: later, ranks write to their logs
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False) if live else None

    def __enter__(self) -> "StatusLine":
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("starting")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, text: str) -> None:
        if self._bar:
            self._bar.update(self._task, description=text, refresh=True)
