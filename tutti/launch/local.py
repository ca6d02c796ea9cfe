"""Ranks on this machine, kept by torchrun's elastic agent."""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from types import FrameType

from tutti.errors import Interrupted, LaunchError
from tutti.launch.fork_server import be_rank
from tutti.launch.supervisor import send_signal
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.failures import NOTES_VARIABLE, Failure, first_cause, from_exit_code, read_notes
from tutti.ranks.process import FOLDER_VARIABLE, LINE_VARIABLE, launch_line
from tutti.runs.folder import RunFolder


def check_ranks(count: int) -> None:
    """Refuse a number of ranks that cannot be started."""
    if count < 1:
        raise LaunchError(f"-n {count}: expected 1 or more ranks. Try -n 2.")


def start_ranks(
    count: int, arguments: list[str], folder: RunFolder, threads: int | None = None, forked: bool = False
) -> Failure | None:
    """Run `python ARGUMENTS` on every rank until all end; the first cause is returned when one fails.

    Forked ranks come from the nursery, which must be open.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the first cause is told once, here
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(count, os.environ, threads))
    os.environ[FOLDER_VARIABLE] = str(folder.path)
    os.environ[LINE_VARIABLE] = launch_line()
    with tempfile.TemporaryDirectory(prefix="tutti-agent-") as agent_folder:
        os.environ[NOTES_VARIABLE] = agent_folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=agent_folder),
        )
        handler = signal.signal(signal.SIGUSR1, _pass_on)
        try:
            if forked:
                elastic_launch(config, be_rank)(arguments, dict(os.environ))
            else:
                elastic_launch(config, sys.executable)("-u", *arguments)
        except ChildFailedError as error:
            noted = read_notes(Path(agent_folder))
            ranks = {failure.rank for failure in noted}
            unnoted = [from_exit_code(r, f.exitcode) for r, f in error.failures.items() if r not in ranks]
            return first_cause(noted + unnoted)
        except SignalException as error:
            saved = [note for note in read_notes(Path(agent_folder)) if note.exit_code == Interrupted.exit_code]
            if saved:
                return saved[0]
            raise SystemExit(128 + error.sigval) from None
        finally:
            signal.signal(signal.SIGUSR1, handler)
    return None


def _pass_on(number: int, _: FrameType | None) -> None:
    """Send a signal on to the ranks: forked ones, and the children of this process, of which the nursery is none."""
    ranks = {child.pid for child in multiprocessing.active_children() if child.pid}
    if not ranks:
        tasks = Path("/proc/self/task").iterdir()
        ranks = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    send_signal(ranks, number)
