"""What stands for `tutti train FOLDER -n N` in tests: writes what a run leaves, in no time, as its plan says.

The plan is a file beside the points: by point, a list of what its starts do, in turn: finish, fail, stop or wait.
"""

import json
import sys
import time
from pathlib import Path


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
    if wish == "fail":
        print("a word before\nerror: the disk is full. Last lines of its log:\n  | and more")
        sys.exit(2)
    if wish == "die":
        sys.exit(3)
    if wish == "stop":
        sys.exit(75)
    record = {"state": "finished", "ranks": ranks, "plan": {"global_batch": 8 * ranks}, "segments": [{}]}
    (folder / "record.json").write_text(json.dumps(record))
    event = {"event": "step", "step": 20, "loss": 1.0, "seconds": 1.0, "samples_per_second": 100.0 * ranks}
    (folder / "metrics.jsonl").write_text(json.dumps(event) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
