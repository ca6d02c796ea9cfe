"""What stands for `tutti train FOLDER -n N` in tests: writes what a run leaves, in no time, as its plan says.

The plan is a file beside the points: by point, a list of what its starts do, in turn: finish, fail, die, stop, wait, or
one of them after all other points have begun too: meet finish.
"""

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

HUNG_SECONDS = 300.0  # as in tests/waiting.py


def main(folder: Path, ranks: int, plan: Path) -> None:
    wishes = json.loads(plan.read_text()).get(folder.name, ["finish"])
    starts = plan.with_name(f"starts-{folder.name}")
    number = len(starts.read_text().splitlines()) if starts.exists() else 0
    with open(starts, "a") as file:
        file.write(f"{ranks} {sorted(path.name for path in folder.iterdir())}\n")
    wish = wishes[min(number, len(wishes) - 1)]
    (folder / "metrics.jsonl").write_text("")
    if wish == "wait":
        (folder / "checkpoints" / "latest").write_text("step-5")
        time.sleep(600)
    if wish.startswith("meet ") and not all_have_begun(folder.parent, plan.parent):
        sys.exit("the other points do not begin")
    wish = wish.removeprefix("meet ")
    if wish == "fail":
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        failed = {"state": "failed", "ended": ended, "failure": "the disk is full.", "cause": "folder"}
        (folder / "record.json").write_text(json.dumps(failed))
        print("a line before\nerror: another text")
        sys.exit(2)
    if wish == "die":
        sys.exit(3)
    if wish == "stop":
        sys.exit(75)
    record = {"state": "finished", "ranks": ranks, "plan": {"global_batch": 8 * ranks}, "segments": [{}]}
    (folder / "record.json").write_text(json.dumps(record))
    event = {"event": "step", "step": 20, "loss": 1.0, "seconds": 1.0, "samples_per_second": 100.0 * ranks}
    (folder / "metrics.jsonl").write_text(json.dumps(event) + "\n")


def all_have_begun(points: Path, notes: Path) -> bool:
    deadline = time.monotonic() + HUNG_SECONDS
    while time.monotonic() < deadline:
        if all((notes / f"starts-{point.name}").exists() for point in points.iterdir()):
            return True
        time.sleep(0.02)
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
