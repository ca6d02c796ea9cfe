"""A study of points that stand for runs, as a process of its own that can be killed: FOLDER PLAN [retry]."""

import sys
from dataclasses import dataclass
from pathlib import Path

from prepared import PYTHON

from tutti.study.definition import PointState, StudyFolder, read_definition
from tutti.study.running import PointProgress, run_study


@dataclass(frozen=True)
class Pretended:
    """Starts what stands for a run."""

    plan: Path
    most: int | None = None

    def command(self, folder: Path, ranks: int) -> list[str]:
        work = Path(__file__).with_name("study_point_work.py")
        return [PYTHON, str(work), str(folder), str(ranks), str(self.plan)]

    def describe(self) -> str:
        return "in tests"


class Noted:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def begins(self, place: PointProgress) -> None:
        print(f"begins {place.point.id}", flush=True)

    def ended(self, place: PointProgress, state: PointState, seconds: float) -> None:
        self.ends.append((place.point.id, state.state))


if __name__ == "__main__":
    study = StudyFolder(Path(sys.argv[1]))
    run_study(study, read_definition(study), Pretended(Path(sys.argv[2])), Noted(), "retry" in sys.argv)
