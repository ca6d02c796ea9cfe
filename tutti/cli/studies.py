"""What `tutti scale` and `tutti sweep` share: a study made or found, run here or submitted, and shown."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tutti.cli.ranks import terminate
from tutti.cli.study_progress import StudyProgress
from tutti.cli.study_table import show_study
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, Interrupted
from tutti.launch import local
from tutti.launch.cluster.resources import Wishes
from tutti.runs.record import now, versions
from tutti.study.checking import Checked
from tutti.study.definition import Definition, Goal, Kind, Mode, StudyFolder, read_definition, read_state
from tutti.study.executors import Executor, Local, check_at_once, check_room, choose_executor
from tutti.study.folder import find_study, held, make_study
from tutti.study.goals import describe
from tutti.study.running import run_study
from tutti.study.submitted import look_at_jobs, prepare_jobs, submit_missing, write_jobs


@dataclass(frozen=True)
class Where:
    """Where a study is kept, and where its points run."""

    out: str | None
    on: str | None
    wishes: Wishes
    at_once: int | None = None  # points beside each other on this machine


@dataclass(frozen=True)
class Planned:
    """A study before its folder is made."""

    kind: Kind
    recipe: str
    overrides: tuple[str, ...]
    goal: Goal
    checked: Sequence[Checked]
    mode: Mode | None = None


def start_study(planned: Planned, where: Where) -> None:
    """Make the folder of a study, and run it or submit it."""
    config = planned.checked[0].config
    jobs, executor = [], None
    if where.on is not None:
        _refuse_at_once(where)
        jobs = prepare_jobs(planned.recipe, planned.checked, where.on, where.wishes)
    else:
        executor = _executor(where.wishes.ranks_per_node, [each.point.ranks for each in planned.checked])
        check_at_once(executor, where.at_once)
        _note_shared_cores(config, executor, max(each.point.ranks for each in planned.checked))
    definition = _define(planned, where)
    folder = make_study(where.out or config.out, config.recipe, definition, planned.checked)
    print(
        f"{definition.kind} study of {config.recipe}: {_describe(definition)}\nstudy folder: {folder.path}", flush=True
    )
    with held(folder):
        if executor is None:
            write_jobs(folder, definition, jobs)
            _submit(folder, definition, retry=False)
        else:
            _run(folder, definition, executor, False, definition.at_once)


def resume_study(given: str, kind: Kind, where: Where, retry: bool) -> None:
    """Go on with what is missing of a study; of a submitted one, look at its jobs first."""
    folder = find_study(given, kind, where.out or "runs")
    definition = read_definition(folder)
    if definition.kind != kind:
        raise ConfigError(f"{folder.path} is a study of tutti {definition.kind}: go on with tutti {definition.kind}.")
    make_importable(definition.recipe)
    print(f"{kind} study of {definition.recipe}: {_describe(definition)}\nstudy folder: {folder.path}", flush=True)
    with held(folder):
        if definition.on is not None:
            _refuse_at_once(where)
            look_at_jobs(folder, definition)
            _submit(folder, definition, retry)
            return
        executor = _executor(where.wishes.ranks_per_node, [point.ranks for point in definition.points])
        check_at_once(executor, where.at_once)
        _run(folder, definition, executor, retry, where.at_once or definition.at_once)


def recipe_of(recipe: str | None, retry: bool, example: str) -> str:
    """The recipe of a study that begins, which can be imported from now on; a study of nothing is refused."""
    if retry:
        raise ConfigError("--retry without --resume: expected the study whose failed points are run again.")
    if recipe is None:
        raise ConfigError(f"no recipe is given: expected {example}.")
    make_importable(recipe)
    return recipe


def refuse_with_resume(given: dict[str, object]) -> None:
    """A study that goes on is as it was defined."""
    named = [name for name, value in given.items() if value]
    if named:
        raise ConfigError(
            f"--resume with {', '.join(named)}: a study goes on as it was defined. Leave out the rest, or start "
            "another study."
        )


def wishes_for(
    on: str | None, ranks_per_node: int | None, time: str | None, account: str | None, queue: str | None
) -> Wishes:
    """What each job asks for; without jobs there is nobody to ask."""
    for option, value in (("--time", time), ("--account", account), ("--queue", queue)):
        if on is None and value is not None:
            raise ConfigError(f"{option} {value} is for points that are jobs: expected --on slurm, for example.")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise ConfigError(f"--ranks-per-node {ranks_per_node}: expected 1 or more.")
    return Wishes(ranks_per_node=ranks_per_node, time=time or Wishes.time, account=account, queue=queue)


def _define(planned: Planned, where: Where) -> Definition:
    shared = {field.name: getattr(planned, field.name) for field in fields(planned) if field.name != "checked"}
    return Definition(
        **shared,
        points=tuple(each.point for each in planned.checked),
        at_once=where.at_once or 1,
        on=where.on,
        created=now(),
        launch_line=local.launch_line(),
        versions=versions(),
    )


def _refuse_at_once(where: Where) -> None:
    if where.at_once is not None:
        raise ConfigError(
            f"--at-once {where.at_once} is for points on this machine: jobs run one after another. Leave it out."
        )


def _executor(ranks_per_node: int | None, ranks: Sequence[int]) -> Executor:
    executor = choose_executor(os.environ, ranks_per_node)
    check_room(executor, max(ranks))
    return executor


def _note_shared_cores(config: RunConfig, executor: Executor, most: int) -> None:
    """Ranks without a core of their own do not show how a recipe scales."""
    cores = len(os.sched_getaffinity(0))
    has_gpu = config.runtime.device != "cpu" and Path("/dev/nvidiactl").exists()
    if isinstance(executor, Local) and most > cores and not has_gpu:
        print(
            f"note: {most} ranks share {cores} core(s) here, which costs efficiency that cores of their own would not"
        )


def _describe(definition: Definition) -> str:
    points = len(definition.points)
    mode = f"{definition.mode}, " if definition.mode else ""
    return f"{mode}{points} point{'s' * (points != 1)}, each {describe(definition.goal)}"


def _run(folder: StudyFolder, definition: Definition, executor: Executor, retry: bool, at_once: int) -> None:
    try:
        with _ended_by_signals(), StudyProgress(folder, definition, at_once) as shown:
            run_study(folder, definition, executor, shown, retry, at_once)
    except Interrupted as stopped:  # no error: it was asked for
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    show_study(folder, definition)
    if not any(read_state(folder, point.id).state == "finished" for point in definition.points):
        sys.exit(1)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The end of an allocation is told by TERM, as Ctrl-C is on a terminal by INT."""
    handler = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _submit(folder: StudyFolder, definition: Definition, retry: bool) -> None:
    submitted = submit_missing(folder, definition, retry)
    if submitted:
        print(f"submitted to {definition.on}, one after another: {', '.join(submitted)}")
    show_study(folder, definition)
    if any(read_state(folder, point.id).state not in ("finished", "failed") for point in definition.points):
        print(f"follow: tutti {definition.kind} --resume {folder.path}")
