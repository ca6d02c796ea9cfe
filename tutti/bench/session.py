"""Ranks that have met to measure something: who they are, what they run on, and the folder of what they find."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tutti.config.run import RunConfig
from tutti.errors import TuttiError
from tutti.launch.local import launch_line
from tutti.records.folder import RunFolder, create_folder, remove_folder, write_config
from tutti.records.output import captured_output, log_traceback
from tutti.records.record import Record
from tutti.runtime.device import bind_rank, choose_device, set_determinism, set_threads
from tutti.runtime.group import Group, abandon, join
from tutti.runtime.placement import Placement
from tutti.train.resume import agreed
from tutti.train.start import check_same_code


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
        """A line on the screen, by rank 0."""
        if self.group.is_first:
            print(text, flush=True)


@contextmanager
def open_session(
    kind: str, config: RunConfig, placement: Placement, folder: RunFolder | None = None
) -> Iterator[Session]:
    """Meet the other ranks, open the folder and its record, and close all that whatever happens.

    A wrong input that a rank finds leaves no folder behind; every other failure is in the record.
    """
    bind_rank(config.runtime, placement)
    threads = set_threads(config.runtime, placement)
    set_determinism(config.runtime)
    error: TuttiError | None = None
    device = torch.device("cpu")
    try:
        device = choose_device(config.runtime, placement)
    except TuttiError as found:
        error = found
    group = join(placement, config.runtime)
    try:
        group.agree(error)
        check_same_code(group)
        folder = _open_folder(kind, config, group, folder)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        record = Record(folder.record)
        with captured_output(folder.log(group.rank), on_screen=group.is_first):
            _begin(record, kind, config, group, name, threads)
            session = Session(config, placement, group, device, name, threads, folder, record)
            with _ended(session):
                yield session
        group.leave()
    except BaseException:
        abandon()
        raise


def _open_folder(kind: str, config: RunConfig, group: Group, folder: RunFolder | None) -> RunFolder:
    if folder is not None:
        return folder
    made = agreed(
        group,
        lambda: create_folder(config.out, f"{kind}/{config.recipe}", group.world_size) if group.is_first else None,
    )
    return group.from_first(made)


def _begin(record: Record, kind: str, config: RunConfig, group: Group, device_name: str, threads: int) -> None:
    if not group.is_first:
        return
    write_config(RunFolder(record.path.parent), config.as_yaml())
    record.content |= {"kind": kind, "recipe": config.recipe, "ranks": group.world_size, "seed": config.seed}
    record.start(
        framework=config.framework,
        launcher=group.placement.launcher,
        launch_line=launch_line(),
        ranks=group.world_size,
        hosts=group.hosts,
        device=device_name,
        threads_per_rank=threads,
    )


@contextmanager
def _ended(session: Session) -> Iterator[None]:
    """Close the record with how it ended."""
    is_first = session.group.is_first
    try:
        yield
    except TuttiError as error:
        if is_first and error.exit_code == 2:
            remove_folder(session.folder)
        elif is_first:
            session.record.end("failed", failure=str(error))
        raise
    except BaseException as error:
        if is_first:
            session.record.end("failed", failure=f"{type(error).__name__}: {error}".split("\n")[0])
        log_traceback()
        raise
    if is_first:
        session.record.end("finished")
