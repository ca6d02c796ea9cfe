"""Code that `tutti scale` and `tutti sweep` share: create or resume a study, run or submit it, and print it."""

import contextlib
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tutti import units
from tutti.cli.options import JOBS_PANEL, JobAccount, JobDirectives, JobQueue, Overrides, complete_recipe
from tutti.cli.ranks import terminate
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import ConfigError, Interrupted
from tutti.launch import local
from tutti.launch.cluster.resources import Wishes
from tutti.launch.cluster.submission import describe_missing_data
from tutti.runs.output import lasting_output
from tutti.runs.record import now, versions
from tutti.runs.step_parts import StepPart
from tutti.study.analysis import Analysis, Setting, analyse
from tutti.study.checking import Checked, describe_goal
from tutti.study.definition import (
    Definition,
    Goal,
    Kind,
    Mode,
    Point,
    PointState,
    StudyFolder,
    read_definition,
    read_state,
)
from tutti.study.executors import Executor, Local, check_at_once, check_capacity, choose_executor
from tutti.study.folder import find_study, lock_study, make_study, planned_study
from tutti.study.outcome import PointOutcome, RunFigures, Summary, read_figures, read_outcomes, summarise
from tutti.study.running import PointProgress, run_study
from tutti.study.submitted import prepare_jobs, render_scripts, submit_missing, update_states, write_jobs
from tutti.study.sweep_results import value_words

_REASON_LENGTH = 80  # characters of a reason in a line


@dataclass(frozen=True)
class StudyOptions:
    """What `tutti scale` and `tutti sweep` both take."""

    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name or the path of a YAML file.", autocompletion=complete_recipe)
    ] = None
    overrides: Overrides = None
    out: Annotated[str | None, typer.Option(help="The folder for studies/.", show_default="the recipe's out")] = None
    resume: Annotated[
        str | None, typer.Option(help="Run the missing points of a study.", metavar="[latest|FOLDER]")
    ] = None
    retry: Annotated[bool, typer.Option("--retry", help="With --resume: also run the failed points again.")] = False
    on: Annotated[
        str | None, typer.Option(help="A scheduler or site: each point is a job.", rich_help_panel=JOBS_PANEL)
    ] = None
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks on each node.", rich_help_panel=JOBS_PANEL)] = None
    time: Annotated[
        str | None, typer.Option(help="Time limit of each job.", rich_help_panel=JOBS_PANEL, show_default=Wishes.time)
    ] = None
    account: JobAccount = None
    queue: JobQueue = None
    directives: JobDirectives = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the job scripts and write nothing.", rich_help_panel=JOBS_PANEL),
    ] = False

    def __post_init__(self) -> None:
        """Refuse options of jobs for points that are not jobs."""
        directive = next(iter(self.directives or ()), None)
        of_jobs = {"--time": self.time, "--account": self.account, "--queue": self.queue, "--directive": directive}
        for option, value in of_jobs.items():
            if self.on is None and value is not None:
                raise ConfigError(f"{option} {value} is for points that are jobs: expected --on slurm, for example.")
        if self.dry_run and (self.on is None or self.resume is not None):
            raise ConfigError("--dry-run prints the jobs of a new study: expected --on slurm, for example.")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"--ranks-per-node {self.ranks_per_node}: expected 1 or more.")

    @property
    def wishes(self) -> Wishes:
        """The resources of each job."""
        given = {"account": self.account, "queue": self.queue, "directives": tuple(self.directives or ())}
        return Wishes(ranks_per_node=self.ranks_per_node, time=self.time or Wishes.time, **given)

    def new_recipe(self, example: str) -> str:
        """The recipe of a new study, whose modules can be imported afterwards."""
        if self.retry:
            raise ConfigError("--retry without --resume: expected the study whose failed points are run again.")
        if self.recipe is None:
            raise ConfigError(f"no recipe is given: expected {example}.")
        make_importable(self.recipe)
        return self.recipe

    def refuse_with_resume(self, others: Mapping[str, object]) -> None:
        """Refuse options that would change a study that is resumed; `others` are those of the command alone."""
        given = {"RECIPE": self.recipe, "overrides": self.overrides, **others, "--on": self.on}
        named = [name for name, value in given.items() if value]
        if named:
            raise ConfigError(
                f"--resume with {', '.join(named)}: a study resumes as it was defined. Leave out the rest, or start "
                "another study."
            )


@dataclass(frozen=True)
class Planned:
    """A study before its folder is created."""

    kind: Kind
    recipe: str
    overrides: tuple[str, ...]
    goal: Goal
    checked: Sequence[Checked]
    mode: Mode | None = None


@lasting_output()
def start_study(planned: Planned, options: StudyOptions, at_once: int | None = None) -> None:
    """Create the folder of a study, and run or submit it; `at_once` points run together on this machine."""
    config = planned.checked[0].config
    jobs, executor = [], None
    if options.on is not None:
        _refuse_at_once(at_once)
        jobs = prepare_jobs(planned.recipe, planned.checked, options.on, options.wishes, options.dry_run)
        if warning := describe_missing_data([each.config for each in planned.checked]):
            print(warning, file=sys.stderr)
        if options.dry_run:
            folder = planned_study(options.out or config.out, config.recipe, planned.kind, planned.mode)
            print("\n".join(render_scripts(folder, planned.checked, jobs)), end="")
            return
    else:
        executor = _executor(options.ranks_per_node, [each.point.ranks for each in planned.checked])
        check_at_once(executor, at_once)
        _note_shared_cores(config, executor, max(each.point.ranks for each in planned.checked))
    definition = _define(planned, options.on, at_once)
    folder = make_study(options.out or config.out, config.recipe, definition, planned.checked)
    _print_title(definition, config.recipe, folder)
    with lock_study(folder):
        if executor is None:
            write_jobs(folder, definition, jobs)
            _submit(folder, definition, retry=False)
        else:
            _run(folder, definition, executor, False, definition.at_once)


@lasting_output()
def resume_study(given: str, kind: Kind, options: StudyOptions, at_once: int | None = None) -> None:
    """Run the missing points of a study; of a submitted study, check its jobs first."""
    folder = find_study(given, kind, options.out or "runs")
    definition = read_definition(folder)
    if definition.kind != kind:
        raise ConfigError(
            f"{folder.path} is a study of tutti {definition.kind}: resume it with tutti {definition.kind}."
        )
    make_importable(definition.recipe)
    _print_title(definition, definition.recipe, folder)
    with lock_study(folder):
        if definition.on is not None:
            _refuse_at_once(at_once)
            update_states(folder, definition)
            _submit(folder, definition, options.retry)
            return
        executor = _executor(options.ranks_per_node, [point.ranks for point in definition.points])
        check_at_once(executor, at_once)
        _run(folder, definition, executor, options.retry, at_once or definition.at_once)


def _define(planned: Planned, on: str | None, at_once: int | None) -> Definition:
    shared = {field.name: getattr(planned, field.name) for field in fields(planned) if field.name != "checked"}
    return Definition(
        **shared,
        points=tuple(each.point for each in planned.checked),
        at_once=at_once or 1,
        on=on,
        created=now(),
        launch_line=local.launch_line(),
        versions=versions(),
    )


def _refuse_at_once(at_once: int | None) -> None:
    if at_once is not None:
        raise ConfigError(
            f"--at-once {at_once} is for points on this machine: jobs run one after another. Leave it out."
        )


def _executor(ranks_per_node: int | None, ranks: Sequence[int]) -> Executor:
    executor = choose_executor(os.environ, ranks_per_node)
    check_capacity(executor, max(ranks))
    return executor


def _note_shared_cores(config: RunConfig, executor: Executor, most: int) -> None:
    """Print a note if ranks share cores, which lowers their efficiency."""
    cores = len(os.sched_getaffinity(0))
    has_gpu = config.runtime.device != "cpu" and Path("/dev/nvidiactl").exists()
    if isinstance(executor, Local) and most > cores and not has_gpu:
        print(f"note: {most} ranks share {units.count(cores, 'core')} here, which lowers their efficiency")


def _print_title(definition: Definition, recipe: str, folder: StudyFolder) -> None:
    mode = f"{definition.mode}, " if definition.mode else ""
    points = f"{units.count(len(definition.points), 'point')}, each {describe_goal(definition.goal)}"
    print(f"{definition.kind} study of {recipe}: {mode}{points}\nstudy folder: {folder.path}", flush=True)


def _run(folder: StudyFolder, definition: Definition, executor: Executor, retry: bool, at_once: int) -> None:
    try:
        with _ended_by_signals(), StudyProgress(folder, definition, at_once) as shown:
            run_study(folder, definition, executor, shown, retry, at_once)
    except Interrupted as stopped:  # not an error: the user has interrupted it
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)
    show_study(folder, definition)
    if not any(read_state(folder, point.id).state == "finished" for point in definition.points):
        sys.exit(1)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM, which ends an allocation, as Ctrl-C."""
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


class StudyProgress:
    """Shows the progress of a study; drawn only when a point begins or ends, so as not to disturb a measurement."""

    def __init__(self, folder: StudyFolder, definition: Definition, at_once: int) -> None:
        self._folder, self._definition, self._at_once = folder, definition, at_once
        self._seconds: list[float] = []
        self._width = max(len(point.id) for point in definition.points)
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[left]}"))
            self._bar = Progress(*columns, console=Console(file=sys.stdout), transient=True, auto_refresh=False)

    def __enter__(self) -> "StudyProgress":
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=len(self._definition.points), left="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def begins(self, place: PointProgress) -> None:
        if self._bar:
            text = f"point {place.number} of {place.of}: {place.point.id}"
            done = len(self._seconds)
            left = self._left(place.of - done)
            self._bar.update(self._task, description=text, completed=done, total=place.of, left=left, refresh=True)

    def ended(self, place: PointProgress, state: PointState, seconds: float) -> None:
        self._seconds.append(seconds)
        words = [f"point {place.number:>{len(str(place.of))}} of {place.of}", f"{place.point.id:<{self._width}}"]
        words += (
            self._gave(place.point) if state.state == "finished" else [f"{state.state}: {_short(state.reason or '')}"]
        )
        words += [units.duration(seconds), self._left(place.of - len(self._seconds))]
        line = "  ".join(word for word in words if word)
        if self._bar:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def _gave(self, point: Point) -> list[str]:
        """The results of a run."""
        outcome = read_outcomes(self._folder, replace(self._definition, points=(point,)))[0]
        figures = read_figures(outcome, self._definition.goal)
        words = [f"{units.number(figures.speed.median, keep_zeros=True)} samples/s"] if figures.speed else []
        if self._definition.goal.kind != "steps":
            words += [f"{name.replace('_', ' ')} {units.metric(name, v)}" for name, v in figures.final.items()]
        return words + ([f"collapsed: {figures.collapse}"] if figures.collapse else [])

    def _left(self, points: int) -> str:
        if not points or not self._seconds:
            return ""
        seconds = round(statistics.median(self._seconds) * points / self._at_once)
        return f"about {seconds // 60}:{seconds % 60:02d} left"


def _short(reason: str) -> str:
    """The beginning of a reason, which is printed in full at the end."""
    return reason if len(reason) <= _REASON_LENGTH else f"{reason[:_REASON_LENGTH]} ..."


def show_study(folder: StudyFolder, definition: Definition) -> None:
    """Print the state of a study; when it has ended, write the report and print its conclusions."""
    print_study(definition, read_outcomes(folder, definition))
    states = {point.id: read_state(folder, point.id) for point in definition.points}
    failed = {name: state for name, state in states.items() if state.state == "failed"}
    for name, state in failed.items():
        print(f"failed: {name}: {state.reason}")
    if failed:
        again = shlex.join(["tutti", definition.kind, "--resume", str(folder.path), "--retry"])
        print(f"run what failed again: {again}")
    print(f"\nstudy folder: {folder.path}", flush=True)
    print(f"report: {_write_report(folder, {state.state for state in states.values()})}", flush=True)


def _write_report(folder: StudyFolder, states: set[str]) -> str:
    """Write the page of a study that has ended, or return the command that writes it."""
    if "finished" not in states or not states <= {"finished", "failed"}:
        return f"tutti report {folder.path}"
    from tutti.report.study.write import write_report

    written = write_report(folder.path)
    print("\n".join(["", *written.conclusions, ""]))
    return str(written.page)


def print_study(definition: Definition, outcomes: Sequence[PointOutcome]) -> None:
    """Print the results of all points, repeats together."""
    analysis = analyse(definition, outcomes)
    rows = [_row(analysis, setting) for setting in analysis.settings]
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    words = {"state", *(key for key in analysis.settings[0].values if key != "ranks")}
    print()
    units.print_table(titles, [[row[title] for title in titles] for row in rows], left=words)


def _row(analysis: Analysis, setting: Setting) -> dict[str, str]:
    """Cells by title; a column that is empty in all rows is left out."""
    among = [each.values for each in analysis.settings]
    row = {key: value_words(value, [each.get(key) for each in among]) for key, value in setting.values.items()} | {
        "ranks": str(setting.ranks)
    }
    batch = setting.plan.get("global_batch")
    row["global batch"] = "" if batch is None or "batch.global" in row else f"{batch:,}"
    row["state"] = _describe_state(setting)
    speed = setting.speed
    row["samples/s"] = units.number(speed.median, keep_zeros=True) if speed else ""
    row["spread"] = _spread(setting.finished)
    point = analysis.scaling.at(setting.ranks) if analysis.scaling else None
    row["efficiency"] = units.percent(point.efficiency.value) if point else ""
    exchange = point.share_estimates.get(StepPart.COMMUNICATION) if point and setting.ranks > 1 else None
    row["communication"] = units.percent(exchange.value) if exchange else ""
    metric = analysis.metric
    if metric is not None and analysis.definition.goal.kind != "steps":
        row[metric.replace("_", " ")] = _metric(metric, setting.final(metric))
        to = " to target" if analysis.definition.goal.target is not None else ""
        steps, seconds = setting.steps_to_goal(), setting.seconds_to_goal()
        row[f"steps{to}"] = units.number(steps.median) if steps else ""
        row[f"seconds{to}"] = f"{seconds.median:,.1f}" if seconds else ""
    return row


def _describe_state(setting: Setting) -> str:
    """The state of all runs, or how many have each state."""
    states = [run.outcome.state.state for run in setting.runs]
    kinds = list(dict.fromkeys(states))
    words = kinds[0] if len(states) == 1 else ", ".join(f"{states.count(kind)} {kind}" for kind in kinds)
    collapsed = [run for run in setting.collapsed if run.outcome.is_finished]
    return f"{words}, {len(collapsed)} collapsed" if collapsed else words


def _spread(runs: Sequence[RunFigures]) -> str:
    """The standard deviation of repeats, or of the windows of one run."""
    speeds = [run.speed for run in runs if run.speed]
    found = summarise([speed.median for speed in speeds]) if len(speeds) > 1 else next(iter(speeds), None)
    return units.percent(found.deviation / found.mean, 1) if found and found.n > 1 else ""


def _metric(name: str, found: Summary | None) -> str:
    """The mean, and the lowest and highest value of several runs."""
    if found is None:
        return ""
    if found.n == 1:
        return units.metric(name, found.mean)
    return units.interval(partial(units.metric, name), found.mean, found.low, found.high)
