"""A study as a table, a row for each number of ranks or combination of values; what failed, and where the rest is."""

import shlex
from collections.abc import Sequence

from tutti.cli.tables import print_table
from tutti.runs.screen import show_number
from tutti.runs.step_parts import StepPart
from tutti.study import numbers
from tutti.study.analysis import Analysis, Setting, analyse
from tutti.study.definition import Definition, StudyFolder, read_state
from tutti.study.outcome import Outcome, read_outcomes
from tutti.study.run_figures import RunFigures, Summary, summarise
from tutti.study.series import value_words


def show_study(folder: StudyFolder, definition: Definition) -> None:
    """Print how a study stands; of one that has ended, write the report, and print what it concludes."""
    print_study(definition, read_outcomes(folder, definition))
    states = {point.id: read_state(folder, point.id) for point in definition.points}
    failed = {name: state for name, state in states.items() if state.state == "failed"}
    for name, state in failed.items():
        print(f"failed: {name}: {state.reason}")
    if failed:
        again = shlex.join(["tutti", definition.kind, "--resume", str(folder.path), "--retry"])
        print(f"run what failed again: {again}")
    print(f"\nstudy folder: {folder.path}", flush=True)
    print(f"report: {_report(folder, {state.state for state in states.values()})}", flush=True)


def _report(folder: StudyFolder, states: set[str]) -> str:
    """The page of a study that has ended; the command that makes one before."""
    if "finished" not in states or not states <= {"finished", "failed"}:
        return f"tutti report {folder.path}"
    from tutti.report.study.write import write_report

    written = write_report(folder.path)
    print("\n".join(["", *written.conclusions, ""]))
    return str(written.page)


def print_study(definition: Definition, outcomes: Sequence[Outcome]) -> None:
    """Print what all points came to, repeats together."""
    analysis = analyse(definition, outcomes)
    rows = [_row(analysis, setting) for setting in analysis.settings]
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    words = {"state", *(key for key in analysis.settings[0].values if key != "ranks")}
    print()
    print_table(titles, [[row[title] for title in titles] for row in rows], [t for t in titles if t not in words])


def _row(analysis: Analysis, setting: Setting) -> dict[str, str]:
    """By title; a column that is empty in all rows is left out."""
    among = [each.values for each in analysis.settings]
    row = {key: value_words(value, [each.get(key) for each in among]) for key, value in setting.values.items()} | {
        "ranks": str(setting.ranks)
    }
    batch = setting.plan.get("global_batch")
    row["global batch"] = "" if batch is None or "batch.global" in row else f"{batch:,}"
    row["state"] = _state(setting)
    speed = setting.speed
    row["samples/s"] = numbers.speed(speed.median) if speed else ""
    row["spread"] = _spread(setting.finished)
    point = analysis.scaling.at(setting.ranks) if analysis.scaling else None
    row["efficiency"] = f"{point.efficiency.value:.0%}" if point else ""
    exchange = point.share_estimates.get(StepPart.COMMUNICATION) if point and setting.ranks > 1 else None
    row["communication"] = f"{exchange.value:.0%}" if exchange else ""
    metric = analysis.metric
    if metric is not None and analysis.definition.goal.kind != "steps":
        row[metric.replace("_", " ")] = _metric(metric, setting.final(metric))
        to = " to target" if analysis.definition.goal.target is not None else ""
        steps, seconds = setting.steps_to_goal(), setting.seconds_to_goal()
        row[f"steps{to}"] = f"{steps.median:,.0f}" if steps else ""
        row[f"seconds{to}"] = f"{seconds.median:,.1f}" if seconds else ""
    return row


def _state(setting: Setting) -> str:
    """The state that all runs share, or how many have which."""
    states = [run.outcome.state.state for run in setting.runs]
    kinds = list(dict.fromkeys(states))
    words = kinds[0] if len(states) == 1 else ", ".join(f"{states.count(kind)} {kind}" for kind in kinds)
    collapsed = [run for run in setting.collapsed if run.outcome.is_finished]
    return f"{words}, {len(collapsed)} collapsed" if collapsed else words


def _spread(runs: Sequence[RunFigures]) -> str:
    """The standard deviation of repeats, or of the windows of one run."""
    speeds = [run.speed for run in runs if run.speed]
    found = summarise([speed.median for speed in speeds]) if len(speeds) > 1 else next(iter(speeds), None)
    return f"{found.deviation / found.mean:.1%}" if found and found.n > 1 else ""


def _metric(name: str, found: Summary | None) -> str:
    """The mean, with the least and the largest where there are several."""
    if found is None:
        return ""
    if found.n == 1:
        return show_number(name, found.mean)
    return f"{show_number(name, found.mean)} ({show_number(name, found.low)} to {show_number(name, found.high)})"
