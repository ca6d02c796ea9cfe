"""Ranks on this machine, supervised by torchrun's elastic agent and forked from a server that has imported torch.

Importing torch takes longer than many a short run. The fork server imports it once, while the launcher still reads its
input: that halves the time to the first step of a run of two ranks, and saves far more with eight.
"""

import multiprocessing
import os
import platform
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from tutti.errors import Cause, Interrupted, LaunchError, RankLost
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.failures import NOTES_VARIABLE, Failure, first_cause, from_exit_code, note_signal, read_notes
from tutti.ranks.process import FOLDER_VARIABLE, LINE_VARIABLE, end_with_parent, launch_line, name_process, send_signal
from tutti.runs.folder import RunFolder
from tutti.runs.record import read_record

FORK_SERVER_VARIABLE = "TUTTI_FORK_SERVER"  # set in the environment of the fork server alone
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_POLL_SECONDS = 0.2
_START_SECONDS = 20.0  # within which ranks that have not begun to train end after a signal
_OF_THE_AGENT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_AT_ONCE = 128 + signal.SIGINT
_kept: list[Any] = []  # objects that a forked rank must not free: their destructors would wait for threads
_is_forked = False

if os.environ.pop(FORK_SERVER_VARIABLE, None):  # this process is the fork server, which imports this module first
    end_with_parent()


def start_fork_server(modules: Sequence[str], threads: int) -> None:
    """Start the process that imports these modules; libraries fix their number of threads when they are imported."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), FORK_SERVER_VARIABLE: "1"}
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *modules])
    # A signal to the whole process group must not end the server, with which all ranks end: it starts with the signals
    # blocked, and ends with this process. So does Python's tracker, which itself takes care of two of them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGHUP))
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    del os.environ[FORK_SERVER_VARIABLE]


def run_as_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `python -m MODULE WORDS`, given as ["-m", MODULE, *WORDS], in a forked process."""
    global _is_forked
    _is_forked = True
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the rank can do better: no traceback from an import
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher forwards it as SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ |= environment
    name_process(f"tutti rank {os.environ['RANK']}")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = list(arguments[1:])
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


def keep_until_exit(outcome: Any) -> bool:
    """Keep an object until a forked rank has ended; return whether this process is a forked rank."""
    if _is_forked:
        _kept.append(outcome)
    return _is_forked


def check_ranks(count: int) -> None:
    """Refuse a number of ranks that cannot be started."""
    if count < 1:
        raise LaunchError(f"-n {count}: expected 1 or more ranks. Try -n 2.")


def start_ranks(
    count: int,
    arguments: list[str],
    folder: RunFolder,
    threads: int | None = None,
    forked: bool = False,
    saves: bool = False,
) -> Failure | None:
    """Run `python ARGUMENTS` on every rank until all end; return the first cause when one fails.

    Forked ranks need the fork server, which must have been started. Ranks that train save when they are stopped.
    """
    try:
        return _start_ranks(count, arguments, folder, threads, forked, saves)
    except KeyboardInterrupt:  # before signals were forwarded
        if not forked:
            raise
        return interrupted_at_start(folder, saves)


def interrupted_at_start(folder: RunFolder, saves: bool) -> Failure:
    """What Ctrl-C means to a run in a folder before any of its ranks was started."""
    stop = StopSignals(folder)
    stop.first = signal.SIGINT
    return stop.explain([], saves)


def _start_ranks(
    count: int, arguments: list[str], folder: RunFolder, threads: int | None, forked: bool, saves: bool
) -> Failure | None:
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(count, os.environ, threads))
    os.environ[FOLDER_VARIABLE] = str(folder.path)
    os.environ[LINE_VARIABLE] = launch_line()
    with tempfile.TemporaryDirectory(prefix="tutti-agent-") as agent_folder, _forwarded(folder, forked) as stop:
        os.environ[NOTES_VARIABLE] = agent_folder
        ended = _run_agent(count, arguments, Path(agent_folder), forked, stop)
        if stop.first and ended is not None:
            return stop.explain([failure for failure, is_noted in ended if is_noted], saves)
        noted = [failure for failure, is_noted in ended or () if is_noted]
        return first_cause(noted, [failure for failure, is_noted in ended or () if not is_noted])


def _run_agent(
    count: int, arguments: list[str], agent_folder: Path, forked: bool, stop: "StopSignals"
) -> list[tuple[Failure, bool]] | None:
    """Run the agent of torchrun until all ranks have ended; return the failures, and whether the rank noted each.

    None means that all ranks ended well; an empty list, that a signal came before any was started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from tutti.launch.elastic.agent import register_rendezvous, silence_torch
    from tutti.ranks.secret import make_secret

    os.environ |= make_secret().environment()  # of these ranks alone
    silence_torch()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="ranks of one host",
        rdzv_backend=register_rendezvous(),
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(agent_folder)),
        signals_to_handle="SIGQUIT" if forked else _OF_THE_AGENT,
    )
    if stop.first:
        return []
    try:
        if forked:
            elastic_launch(config, run_as_rank)(arguments, dict(os.environ))
        else:
            elastic_launch(config, sys.executable)("-u", *arguments)
    except ChildFailedError as error:
        noted = read_notes(agent_folder)
        if forked and not noted and _fork_server_is_lost():
            text = f"the fork server of the ranks on host {platform.node()} was killed, and the ranks ended with it"
            lost = Failure(0, platform.node(), time.time(), RankLost.exit_code, text, True, False, Cause.RANK_LOST)
            return [(lost, True)]
        ranks = {failure.rank for failure in noted}
        unnoted = [from_exit_code(r, f.exitcode) for r, f in error.failures.items() if r not in ranks]
        return [(failure, True) for failure in noted] + [(failure, False) for failure in unnoted]
    except SignalException as error:
        saved = [note for note in read_notes(agent_folder) if note.exit_code == Interrupted.exit_code]
        if not saved:
            raise SystemExit(128 + error.sigval) from None
        return [(saved[0], True)]
    return None


def _fork_server_is_lost() -> bool:
    """Return whether the fork server has ended before this process."""
    server: int | None = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return server is not None and Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class StopSignals:
    """Forwards the signals that stop a job to its ranks; a second SIGINT ends them at once."""

    def __init__(self, folder: RunFolder) -> None:
        self.first: signal.Signals | None = None
        self._folder = folder
        self._interrupts = 0
        self._told: set[int] = set()  # ranks that have got the first signal
        self._over = threading.Event()

    def __call__(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            send_signal(_rank_processes(), signal.SIGKILL)
        elif self.first is None:
            if number == signal.SIGINT:
                os.write(2, b"\nstopping on SIGINT; a second one ends all ranks at once\n")
            self.first = signal.Signals(number)
            note_signal(number)
            self._tell_ranks()
            threading.Thread(target=self._follow_start, name="stop at the start", daemon=True).start()

    def close(self) -> None:
        """Forget ranks that have ended."""
        self._over.set()

    def _tell_ranks(self) -> None:
        """Send the first signal to the ranks that do not know of it.

        Ranks may have got a SIGINT of their own, from the terminal, and would take another one for the second.
        """
        new = _rank_processes() - self._told
        self._told |= new
        send_signal(new, signal.SIGUSR1 if self.first == signal.SIGUSR1 else signal.SIGTERM)

    def _follow_start(self) -> None:
        """Stop ranks that start after the signal, and end those that wait for each other inside a library."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._over.wait(_POLL_SECONDS):
            self._tell_ranks()
            if time.monotonic() > deadline:
                if (read_record(self._folder.record) or {}).get("state") != "running":
                    send_signal(_rank_processes(), signal.SIGKILL)
                return

    def explain(self, noted: Sequence[Failure], saves: bool) -> Failure:
        """Return how ranks have ended that were stopped: what they say themselves, or that they could not save."""
        assert self.first is not None
        stopped = [note for note in noted if note.exit_code == Interrupted.exit_code]
        own = first_cause([note for note in noted if not note.consequence])
        if self._interrupts < 2 and (stopped or own):
            return stopped[0] if stopped else own  # pyright: ignore[reportReturnType]
        is_at_once = self._interrupts > 1
        how = "ended at once on a second SIGINT" if is_at_once else f"stopped on {self.first.name}"
        early = "" if is_at_once else " too early to save"
        text = f"{how}{early}. Resume with: tutti train {self._folder.path}" if saves else how
        code = Interrupted.exit_code if saves else 128 + self.first
        code = _AT_ONCE if is_at_once else code
        return Failure(0, platform.node(), time.time(), code, text, True, False, Cause.INTERRUPTED)


@contextmanager
def _forwarded(folder: RunFolder, forked: bool) -> Iterator[StopSignals]:
    """Forward signals while ranks run; those that this process was started to ignore stay ignored.

    Scripts of users are no forked ranks: for these the agent of torchrun forwards all but SIGUSR1.
    """
    stop = StopSignals(folder)
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers: dict[signal.Signals, Any] = dict.fromkeys(numbers, stop) if forked else {signal.SIGUSR1: _forward_signal}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        stop.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward_signal(number: int, _: FrameType | None) -> None:
    send_signal(_rank_processes(), number)


def _rank_processes() -> set[int]:
    """The ranks of this process: forked ones, or its children, of which the fork server is none.

    Nothing is asked of a forked process: its exit code can be read once, and the agent does.
    """
    if forkserver._forkserver._forkserver_pid:  # pyright: ignore[reportAttributeAccessIssue]
        return {child.pid for child in list(process._children) if child.pid}  # pyright: ignore
    tasks = Path("/proc/self/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}
