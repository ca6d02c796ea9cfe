"""The ranks of a measurement: their process group, device, run folder and record."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tutti.config.run import RunConfig
from tutti.errors import Cause, TuttiError
from tutti.ranks.group import Group, check_same_code, joined
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder, remove_folder, write_config
from tutti.runs.output import captured_output, log_traceback
from tutti.runs.record import Record
from tutti.train.run import begin_record, make_folder


@dataclass(frozen=True)
class Session:
    """One rank's view of a measurement."""

    config: RunConfig
    placement: Placement
    group: Group
    device: torch.device
    device_name: str
    threads: int
    folder: RunFolder
    record: Record  # rank 0 writes it

    def say(self, text: str = "") -> None:
        """Print a line on rank 0."""
        if self.group.is_first:
            print(text, flush=True)


@contextmanager
def open_session(
    kind: str, config: RunConfig, placement: Placement, folder: RunFolder | None = None
) -> Iterator[Session]:
    """Join the other ranks, and create the run folder and its record; both are closed when the context ends.

    An error in the input removes the folder; every other failure is written to the record.
    """
    with joined(config.runtime, placement) as rank:
        group, machine = rank.group, rank.machine
        check_same_code(group)
        folder = folder or make_folder(group, config.out, f"{kind}/{config.recipe}")
        record = Record(folder.record, {"kind": kind})
        log, prefix = folder.shared_log(group.rank, group.world_size, placement.node_rank)
        with captured_output(log, group.is_first, prefix):
            if group.is_first:
                write_config(folder, config.as_yaml())
                begin_record(record, config, group, machine, hosts=group.hosts)
            session = Session(
                config, placement, group, rank.device, machine.device_name, machine.threads, folder, record
            )
            with _ended(session):
                yield session


@contextmanager
def _ended(session: Session) -> Iterator[None]:
    """Write to the record how the measurement ended."""
    is_first = session.group.is_first
    try:
        yield
    except TuttiError as error:
        if is_first and error.exit_code == 2:
            remove_folder(session.folder)
        elif is_first:
            session.record.fail(error)
        raise
    except KeyboardInterrupt as stopped:
        if is_first:
            signal_name = stopped.args[0] if stopped.args else "SIGINT"
            session.record.end("interrupted", failure=f"stopped on {signal_name}", cause=Cause.INTERRUPTED)
        raise
    except BaseException as error:
        if is_first:
            session.record.fail(error)
        log_traceback()
        raise
    if is_first:
        session.record.end("finished")
