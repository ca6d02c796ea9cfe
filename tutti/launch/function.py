"""`tutti.launch`: call a function on ranks of this machine, from a script or a notebook, and return the results.

Ranks are new interpreters: the fork of a process with threads, as that of a notebook, may hang, and CUDA does not
survive it. The function and its results travel as pickles through a folder that only this user can read.
"""

import contextlib
import os
import pickle
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from tutti.errors import ConfigError, FunctionFailed
from tutti.launch.hosts import LOOPBACK, reserve_port, without_launchers
from tutti.launch.supervisor import GRACE_SECONDS, LocalProcess, end_processes, wait_for_any
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.failures import (
    NOTES_VARIABLE,
    Failure,
    describe,
    first_cause,
    from_exit_code,
    leave_note,
    quote,
    read_notes,
)
from tutti.ranks.process import name_process
from tutti.ranks.secret import Secret, make_secret
from tutti.runs.output import last_lines

_LOOK_SECONDS = 0.1  # between two looks at the output of rank 0


def launch(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """Call `function(*arguments)` on ranks of this machine, and return what each returns, in the order of ranks.

    Every rank is a new process with the variables of torchrun: `tutti.fit` and `torch.distributed` find the others by
    them. What rank 0 prints is shown here. If a rank fails, all end, and FunctionFailed has its traceback. Ctrl-C ends
    all ranks; those in `tutti.fit` save a checkpoint first. A function of a notebook or script needs cloudpickle.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks={ranks!r}: expected a number of ranks, 1 or more. Try ranks=2.")
    if not callable(function):
        raise ConfigError(
            f"tutti.launch: {function!r:.60} is a {type(function).__name__}: expected a function to call."
        )
    call = pack_call((function, arguments), function)
    with tempfile.TemporaryDirectory(prefix="tutti-launch-") as name, reserve_port() as reserved:
        folder, port = Path(name), reserved.getsockname()[1]
        (folder / "call").write_bytes(call)
        processes: list[LocalProcess] = []
        secret = make_secret()  # of these ranks alone
        try:
            with _interrupts_held():  # a process that is being started would be left behind
                for rank in range(ranks):
                    processes.append(_start(rank, ranks, port, folder, secret))
            with open(_log(folder, 0), errors="replace") as output:
                _wait(processes, folder, output)
        finally:
            end_processes(processes, reraise=True)
        if failure := _find_failure(processes, folder):
            raise _explain(failure, folder)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(ranks)]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of this context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def _start(rank: int, ranks: int, port: int, folder: Path, secret: Secret) -> LocalProcess:
    """Start the interpreter of a rank."""
    own = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": threads_per_rank(ranks, os.environ),
        "PYTHONPATH": own_paths(),
        "PYTHONUNBUFFERED": 1,
        NOTES_VARIABLE: folder,
    }
    inherited = without_launchers(os.environ) | secret.environment()
    words = [sys.executable, "-m", "tutti.launch.function", str(folder)]
    return LocalProcess(words, _log(folder, rank), inherited | {name: str(value) for name, value in own.items()})


def _wait(processes: Sequence[LocalProcess], folder: Path, output: TextIO) -> None:
    """Show the output of rank 0 until all ranks have ended or one has failed.

    The rest is given a few seconds where all ranks have returned, or where one only reports that another one is lost.
    """
    left, deadline = list(processes), None
    while left and (deadline is None or time.monotonic() < deadline):
        ended = wait_for_any(left, seconds=_LOOK_SECONDS)
        _show(output)
        left = [process for process in left if process not in ended]
        failure = _find_failure(processes, folder) if ended else None
        if failure is not None and not failure.consequence:
            return
        have_returned = all(_result(folder, rank).exists() for rank in range(len(processes)))
        if deadline is None and (failure is not None or have_returned):
            deadline = time.monotonic() + GRACE_SECONDS


def _show(output: TextIO) -> None:
    if text := output.read():
        sys.stdout.write(text)
        sys.stdout.flush()


def _find_failure(processes: Sequence[LocalProcess], folder: Path) -> Failure | None:
    """The first cause why ranks have ended without a result."""
    failed = {
        rank: process.returncode
        for rank, process in enumerate(processes)
        if process.poll() is not None and not _result(folder, rank).exists()
    }
    noted = [note for note in read_notes(folder) if note.rank in failed]
    known = {note.rank for note in noted}
    return first_cause(noted, [from_exit_code(rank, code) for rank, code in failed.items() if rank not in known])


def _explain(failure: Failure, folder: Path) -> FunctionFailed:
    """The error for the caller, with the traceback of the rank, or with its last output where it has left none."""
    lines, what = last_lines(folder / f"traceback-{failure.rank}"), ""
    if not lines:
        lines, what = last_lines(_log(folder, failure.rank)), " before the function returned"
    error = FunctionFailed(f"rank {failure.rank}: {failure.text}{what}{quote(lines)}")
    error.rank = failure.rank
    return error


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def pack_call(value: Any, function: Callable[..., Any]) -> bytes:
    """Pickle what ranks need for a call, with cloudpickle where it is installed."""
    pickler, name = find_pickler(), getattr(function, "__qualname__", function)
    if pickler is pickle and getattr(function, "__module__", None) == "__main__":
        raise ConfigError(
            f"{name} is defined in the main program, which ranks do not import: expected a function of a module. "
            "Move it into one, or install cloudpickle."
        )
    try:
        return pickler.dumps(value)
    except Exception as error:
        hint = "" if pickler is not pickle else ", or install cloudpickle"
        raise ConfigError(
            f"{name} or its arguments cannot be sent to the ranks: {error}. "
            f"Expected a function of a module with values that can be pickled{hint}."
        ) from error


def find_pickler() -> ModuleType:
    """Return cloudpickle, which also pickles functions and classes of a notebook, or else pickle."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def own_paths() -> str:
    """Return this program's module search path, without the folders of Python itself."""
    of_python = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return os.pathsep.join(
        path or os.getcwd() for path in sys.path if not path.startswith(of_python) and not path.endswith(".zip")
    )


def _run_as_rank(folder: Path) -> None:
    """Call the function in this process, which is a rank, and leave its result or its traceback in the folder."""
    rank = int(os.environ["RANK"])
    name_process(f"tutti rank {rank}")
    try:
        function, arguments = pickle.loads((folder / "call").read_bytes())
        result = function(*arguments)
        aside = folder / f"unfinished-{rank}"
        aside.write_bytes(find_pickler().dumps(result))
        aside.replace(_result(folder, rank))
    except BaseException as error:
        (folder / f"traceback-{rank}").write_text(_traceback(error))
        leave_note(folder, describe(rank, error, 1, said=False))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of torch may wait for ranks that have ended


def _traceback(error: BaseException) -> str:
    """The traceback from the function on, without the frame of this module."""
    own = error.__traceback__
    return "".join(traceback.format_exception(error.with_traceback(own.tb_next if own else None)))


if __name__ == "__main__":
    _run_as_rank(Path(sys.argv[1]))
