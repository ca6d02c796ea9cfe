"""Ranks on this machine, supervised by torchrun's elastic agent and forked from a server that has imported torch.

Importing torch takes longer than many a short run. The fork server imports it once, while the launcher still reads its
input: that halves the time to the first step of a run of two ranks, and saves far more with eight.
"""

import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

from tutti.errors import Interrupted, LaunchError
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.failures import NOTES_VARIABLE, Failure, first_cause, from_exit_code, read_notes
from tutti.ranks.process import FOLDER_VARIABLE, LINE_VARIABLE, end_with_parent, launch_line, name_process, send_signal
from tutti.runs.folder import RunFolder

FORK_SERVER_VARIABLE = "TUTTI_FORK_SERVER"  # set in the environment of the fork server alone
_kept: list[Any] = []  # objects that a forked rank must not free: their destructors would wait for threads
_is_forked = False

if os.environ.pop(FORK_SERVER_VARIABLE, None):  # this process is the fork server, which imports this module first
    end_with_parent()


def start_fork_server(modules: Sequence[str], threads: int) -> None:
    """Start the process that imports these modules; libraries fix their number of threads when they are imported."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), FORK_SERVER_VARIABLE: "1"}
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *modules])
    forkserver.ensure_running()
    del os.environ[FORK_SERVER_VARIABLE]


def run_as_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `python -m MODULE WORDS`, given as ["-m", MODULE, *WORDS], in a forked process."""
    global _is_forked
    _is_forked = True
    end_with_parent()
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
    count: int, arguments: list[str], folder: RunFolder, threads: int | None = None, forked: bool = False
) -> Failure | None:
    """Run `python ARGUMENTS` on every rank until all end; return the first cause when one fails.

    Forked ranks need the fork server, which must have been started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from tutti.launch.elastic.agent import register_rendezvous
    from tutti.ranks.secret import make_secret

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we report the first cause once
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(count, os.environ, threads))
    os.environ |= make_secret().environment()  # of these ranks alone
    os.environ[FOLDER_VARIABLE] = str(folder.path)
    os.environ[LINE_VARIABLE] = launch_line()
    with tempfile.TemporaryDirectory(prefix="tutti-agent-") as agent_folder:
        os.environ[NOTES_VARIABLE] = agent_folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="ranks of one host",
            rdzv_backend=register_rendezvous(),
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=agent_folder),
        )
        handler = signal.signal(signal.SIGUSR1, _forward_signal)
        try:
            if forked:
                elastic_launch(config, run_as_rank)(arguments, dict(os.environ))
            else:
                elastic_launch(config, sys.executable)("-u", *arguments)
        except ChildFailedError as error:
            noted = read_notes(Path(agent_folder))
            ranks = {failure.rank for failure in noted}
            unnoted = [from_exit_code(r, f.exitcode) for r, f in error.failures.items() if r not in ranks]
            return first_cause(noted, unnoted)
        except SignalException as error:
            saved = [note for note in read_notes(Path(agent_folder)) if note.exit_code == Interrupted.exit_code]
            if saved:
                return saved[0]
            raise SystemExit(128 + error.sigval) from None
        finally:
            signal.signal(signal.SIGUSR1, handler)
    return None


def _forward_signal(number: int, _: FrameType | None) -> None:
    """Forward a signal to the ranks: forked ones, or the children of this process, of which the fork server is none."""
    ranks = {child.pid for child in multiprocessing.active_children() if child.pid}
    if not ranks:
        tasks = Path("/proc/self/task").iterdir()
        ranks = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    send_signal(ranks, number)
