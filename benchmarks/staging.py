"""The time to the first step of a job whose Python environment is on a slow shared folder, with and without staging.

Claim: none is tested; the table says where `tutti submit --stage-environment` pays off.

- Four nodes of a real Slurm on this machine (tests/slurm.py), each with its own network, mounts and processes. All
  links are limited by `tc`. The nodes share the cores of one machine, so that times contain more computing than on a
  cluster.
- The shared folder is a real network file system: the login host serves it with OpenSSH's sftp-server, and every node
  mounts it with sshfs, without encryption. Requests for metadata (open, close, stat, list) of all nodes together are
  limited to a number in a second, as by a busy metadata server; data is limited by the links. Each trial mounts anew,
  so that no node has anything in its cache.
- In it are an interpreter, a virtual environment with tutti and the packages it requires, and the run folders. The
  contenders are a job as it is, one that stages its environment on a disk of the node (a tmpfs), and one that finds the
  copy of the job before. All train `digits` on one rank of each node. The clock begins when the job is submitted and
  ends with the record of its first step; packing, which only a changed environment needs, is timed apart.

It needs root, Slurm and sshfs (apt-get install slurm-wlm munge iproute2 sshfs), and takes about 20 minutes
for each trial.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
from packaging.requirements import Requirement

from tutti.launch.cluster.staging.environment import EnvironmentLayer, files_of, find_environment

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

if TYPE_CHECKING:
    from slurm import Cluster

CONTENDERS = ("shared", "staged", "staged before")
HEAD = ("environment", "requests/s", "first step, s", "min", "max", "staging, s", "requests", "MB served")
LIMIT_SECONDS = 900


def main() -> None:
    """Runs all contenders under all limits, and prints the table."""
    import shared_folder
    import slurm

    options = _parse()
    if why := slurm.unavailable():
        sys.exit(f"no nodes are available here: {why}")
    if why := shared_folder.unavailable():
        sys.exit(f"no shared folder can be made here: {why}")
    facts = measure.conditions(ranks=4, trials=options.trials, rate=options.rate)
    measure.print_conditions(facts)
    results = []
    with measure.kept_folder(options.keep, "tutti-staging-") as folder, slurm.running(options.rate) as cluster:
        python, size = make_environment(folder / "shared")
        print(
            f"environment: {size['files']:,} files, {size['bytes'] / 1e6:,.0f} MB; links of {options.rate}", flush=True
        )
        bench = Bench(cluster, folder, python)
        print(f"packed in {bench.pack():.1f} s, once", flush=True)
        for requests in options.requests:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
            for _ in range(options.trials):
                for name in CONTENDERS:  # the last one uses what the one before has left
                    found[name].append(bench.measure(name, requests))
                    print(f"  {name}, {requests or 'unlimited'}: {found[name][-1]}", flush=True)
            results += [{"environment": name, "requests": requests, "trials": found[name]} for name in CONTENDERS]
    measure.print_table(HEAD, [_row(result) for result in results])
    measure.write_json(options.out, {"conditions": facts, "environment": size, "results": results})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="rate of every link, in the notation of tc")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[0, 1000, 250], help="metadata requests/s of all nodes; 0: no limit"
    )
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the shared folder here")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table and its conditions to this JSON file")
    return parser.parse_args()


def _row(result: dict[str, Any]) -> list[str]:
    trials = result["trials"]
    times = measure.spread([each["seconds"] for each in trials])
    middle = [
        f"{measure.spread([each[key] for each in trials])['median']:,.0f}" for key in ("staging", "metadata", "mb")
    ]
    limit = f"{result['requests']:,}" if result["requests"] else "no limit"
    return [result["environment"], limit, *measure.shown(times, 1), *middle]


# The environment: what tutti requires, at a place of its own.


def make_environment(folder: Path) -> tuple[Path, dict[str, int]]:
    """Make an interpreter and a virtual environment with tutti; return its Python, and its size."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    here = find_environment(sys.executable)
    base = next((layer for layer in here.layers if layer.name == "base"), None)
    base = base or EnvironmentLayer("base", Path(sys.base_prefix))
    sizes = [_copy(file.path, folder / "python" / file.name) for file in files_of(base) if file.link is None]
    packages = folder / "venv" / "lib" / version / "site-packages"
    for path, name in _required("tutti-train", "scikit-learn"):
        sizes.append(_copy(path, packages / name))
    for name in ("tutti", "recipes"):
        for file in files_of(EnvironmentLayer(name, REPOSITORY / name)):
            sizes.append(_copy(file.path, packages / name / file.name))
    (folder / "venv" / "bin").mkdir()
    (folder / "venv" / "bin" / "python").symlink_to(folder / "python" / "bin" / version)
    (folder / "venv" / "pyvenv.cfg").write_text(f"home = {folder}/python/bin\n")
    return folder / "venv" / "bin" / "python", {"files": len(sizes), "bytes": sum(sizes)}


def _copy(path: str, to: Path) -> int:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, to)
    return os.path.getsize(path)


def _required(*names: str) -> Iterator[tuple[str, str]]:
    """Yield the files of packages and of all that they require, without extras, and their names in site-packages."""
    waiting, seen = list(names), set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in distribution.files or ():
            path = str(file.locate())
            if not str(file).startswith("..") and not path.endswith(".pth") and os.path.isfile(path):
                yield path, str(file)
        needed = [Requirement(text) for text in distribution.requires or ()]
        waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]


class Bench:
    """The cluster with its shared folder and the disks of its nodes."""

    def __init__(self, cluster: "Cluster", folder: Path, python: Path) -> None:
        import slurm

        self.cluster, self.folder, self.shared, self.local = cluster, folder, folder / "shared", folder / "local"
        self.local.mkdir()
        self.nodes, self.login = slurm.NODES, slurm.LOGIN
        self.python = python
        libraries = f"environment: {{LD_LIBRARY_PATH: {self.shared}/python/lib}}"
        (self.shared / "site.yaml").write_text(f"extends: slurm\n{libraries}\n")
        self.environment = {"LD_LIBRARY_PATH": f"{self.shared}/python/lib", "PYTHONPATH": ""}
        for node in self.nodes:
            cluster.hosts.by_name[node].shell(f"mount -t tmpfs -o size=6g tmpfs {self.local}")

    def pack(self) -> float:
        """Pack the environment by a submission that is cancelled; return the seconds."""
        begin = time.perf_counter()
        run = self._submit("--stage-environment", "--directive=--begin=now+1hour")
        seconds = time.perf_counter() - begin
        self.cluster.run("scancel", json.loads((run / "job.json").read_text())["ids"][0])
        return seconds

    def measure(self, contender: str, requests: int) -> dict[str, float]:
        """Mount the shared folder on all nodes, and run a job to its first step."""
        import shared_folder

        with shared_folder.mounted(self.cluster.hosts, self.login, self.nodes, self.shared, requests) as served:
            found = self._run(contender)
        return found | served

    def _run(self, contender: str) -> dict[str, float]:
        options = [] if contender == "shared" else ["--stage-environment", "--local-disk", str(self.local)]
        options += ["--keep-staged"] if contender == "staged" else []
        if contender == "staged":  # nothing of trials before
            for node in self.nodes:
                self.cluster.hosts.by_name[node].shell(f"rm -rf {self.local}/*")
        run = self._submit(*options)
        begin = time.perf_counter()
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            job = self.cluster.job(json.loads((run / "job.json").read_text())["ids"][0])
            if job.get("JobState") == "FAILED" or time.perf_counter() - begin > LIMIT_SECONDS:
                sys.exit("".join(path.read_text() for path in run.glob("logs/*.out")))
            time.sleep(0.05)
        seconds = time.perf_counter() - begin
        self.cluster.wait(json.loads((run / "job.json").read_text())["ids"][0])
        text = "".join(path.read_text() for path in run.glob("logs/job-*.out"))
        if "use the shared environment" in text:
            sys.exit(text)
        staged = re.search(r"staged in (\d+) s", text)
        return {"seconds": round(seconds, 2), "staging": float(staged[1]) if staged else 0.0}

    def _submit(self, *options: str) -> Path:
        words = ["submit", "digits", "--on", "site.yaml", "--nodes", "4", "--time", "30", *options, *SETTINGS]
        done = self.cluster.run(str(self.python), "-m", "tutti", *words, cwd=self.shared, env=self.environment)
        match = re.search(r"^run folder:\s*(\S+)", done.out, re.MULTILINE)
        if not match:
            sys.exit(done.all)
        return self.shared / match[1]


SETTINGS = ("epochs=2", "log.every_steps=1", "log.tensorboard=false")


if __name__ == "__main__":
    main()
