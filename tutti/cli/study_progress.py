"""How a study goes on: a line for each point that has ended, and on a terminal a bar with the time that is left."""

import statistics
import sys
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tutti.runs.screen import show_number
from tutti.study import numbers
from tutti.study.definition import Definition, Point, State, StudyFolder
from tutti.study.outcome import read_outcomes
from tutti.study.run_figures import read_figures
from tutti.study.running import Place

_REASON = 80  # letters of it in a line


class StudyProgress:
    """Tells the points of a study; drawn when one begins or ends only, so that nothing runs beside a measurement."""

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

    def begins(self, place: Place) -> None:
        if self._bar:
            text = f"point {place.number} of {place.of}: {place.point.id}"
            done = len(self._seconds)
            left = self._left(place.of - done)
            self._bar.update(self._task, description=text, completed=done, total=place.of, left=left, refresh=True)

    def ended(self, place: Place, state: State, seconds: float) -> None:
        self._seconds.append(seconds)
        words = [f"point {place.number:>{len(str(place.of))}} of {place.of}", f"{place.point.id:<{self._width}}"]
        words += (
            self._gave(place.point) if state.state == "finished" else [f"{state.state}: {_short(state.reason or '')}"]
        )
        words += [f"{seconds:.1f} s", self._left(place.of - len(self._seconds))]
        line = "  ".join(word for word in words if word)
        if self._bar:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def _gave(self, point: Point) -> list[str]:
        """What a run has come to."""
        outcome = read_outcomes(self._folder, replace(self._definition, points=(point,)))[0]
        figures = read_figures(outcome, self._definition.goal)
        words = [f"{numbers.speed(figures.speed.median)} samples/s"] if figures.speed else []
        if self._definition.goal.kind != "steps":
            words += [f"{name.replace('_', ' ')} {show_number(name, v)}" for name, v in figures.final.items()]
        return words + ([f"collapsed: {figures.collapse}"] if figures.collapse else [])

    def _left(self, points: int) -> str:
        if not points or not self._seconds:
            return ""
        seconds = round(statistics.median(self._seconds) * points / self._at_once)
        return f"about {seconds // 60}:{seconds % 60:02d} left"


def _short(reason: str) -> str:
    """The beginning of a reason; the whole of it is told at the end."""
    return reason if len(reason) <= _REASON else f"{reason[:_REASON]} ..."
