"""Studies on a real Slurm: points as steps of one allocation, and as jobs one after another."""

import json
import re
from pathlib import Path

import pytest
from slurm import TUTTI, Cluster, wait_until

from tutti.study.definition import StudyFolder, read_definition, read_state
from tutti.study.outcome import read_outcomes

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm"), pytest.mark.slow]

STUDY = ["scale", "digits/mlp", "--ranks", "1,2", "--mode", "weak", "--steps", "10", "--warmup", "2"]


def study_in(folder: Path) -> StudyFolder:
    [path] = folder.glob("runs/studies/digits/mlp/*/study.json")
    return StudyFolder(path.parent)


def hosts_of(folder: StudyFolder) -> list[list[str]]:
    records = [json.loads(folder.run(point).record.read_text()) for point in ("n1-r1", "n2-r1")]
    return [record["segments"][0]["hosts"] for record in records]


def test_points_are_steps_of_an_allocation_of_several_nodes(cluster: Cluster, tmp_path: Path) -> None:
    printed = cluster.finish(f"{TUTTI} {' '.join(STUDY)}", tmp_path, "-N2", "--ntasks-per-node=1")
    folder = study_in(tmp_path)
    assert hosts_of(folder) == [["n1"], ["n1", "n2"]], printed
    line = read_state(folder, "n2-r1").launch_line or ""
    assert line.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1") and " tutti train " in line
    outcomes = read_outcomes(folder, read_definition(folder))
    assert all(each.is_finished and each.windows for each in outcomes)
    assert "report.html" in printed


def test_submitted_points_run_one_after_another_and_are_followed(cluster: Cluster, tmp_path: Path) -> None:
    words = [*TUTTI.split(), *STUDY, "--on", "slurm", "--ranks-per-node", "1", "--time", "5"]
    done = cluster.run(*words, cwd=tmp_path)
    assert done.code == 0 and "submitted to slurm, one after another: n1-r1, n2-r1" in done.out, done.all
    folder = study_in(tmp_path)
    first, second = (read_state(folder, point).job or "" for point in ("n1-r1", "n2-r1"))
    assert re.search(rf"afterany:{first}\b", cluster.job(second).get("Dependency", "")) or first_is_over(cluster, first)

    def look() -> str | None:
        shown = cluster.run(*TUTTI.split(), "scale", "--resume", str(folder.path), cwd=tmp_path)
        assert shown.code == 0, shown.all
        states = {read_state(folder, point).state for point in ("n1-r1", "n2-r1")}
        return shown.out if states <= {"finished", "failed"} else None

    shown = wait_until(look, lambda: f"jobs do not end: {cluster.job(second)}")
    assert [read_state(folder, point).state for point in ("n1-r1", "n2-r1")] == ["finished", "finished"], shown
    assert hosts_of(folder)[1] == ["n1", "n2"]
    assert re.search(r"^ +2 +128 +finished", shown, re.MULTILINE), shown


def first_is_over(cluster: Cluster, job: str) -> bool:
    return cluster.job(job).get("JobState") == "COMPLETED"
