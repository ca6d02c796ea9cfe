"""Jobs that stage their Python environment, on a real Slurm whose nodes have small disks of their own."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Finished
from slurm import NODES, Cluster, told
from small_environment import BASE_STAYS, MEBIBYTES, make_environment

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]


class Staged:
    """A folder that all nodes share, with an environment, and a disk of each node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.local = cluster, folder, folder / "local"
        self.python = make_environment(folder)
        (folder / "site.yaml").write_text(f"extends: slurm\npython: {self.python}\nstage_environment: true\n")
        self.local.mkdir()

    def mount(self, node: str, size: str) -> None:
        self.cluster.hosts.by_name[node].shell(f"mount -t tmpfs -o size={size} tmpfs {self.local}")

    def submit(self, *options: str, nodes: int = 2) -> tuple[Path, str]:
        """Submit with the real `tutti`; the folder of the run, and what was printed."""
        words = ["submit", "digits", "--on", "site.yaml", "--time", "5", "--nodes", str(nodes), *options]
        env = {"PYTHONPATH": ""}
        done = self.cluster.run(sys.executable, "-m", "tutti", *words, cwd=self.folder, env=env)
        match = re.search(r"^run folder:\s*(\S+)", done.out, re.MULTILINE)
        assert done.code == 0 and match, done.all
        return self.folder / match[1], done.out

    def end(self, run: Path) -> str:
        """Wait for the end of a job; what it has printed."""
        job = json.loads((run / "job.json").read_text())["ids"][0]
        ended = self.cluster.wait(job)
        text = "".join(path.read_text() for path in run.glob("logs/job-*.out"))
        assert ended["JobState"] == "COMPLETED", text
        return text

    def is_on_node(self, place: str) -> bool:
        """Whether a file is on the disk of a node, or belongs to the Python that every node has."""
        return place.startswith((str(self.local), "/usr/"))

    def on(self, node: str, *words: str) -> Finished:
        return self.cluster.run(*words, host=node)


@pytest.fixture
def staged(cluster: Cluster, tmp_path: Path) -> Iterator[Staged]:
    made = Staged(cluster, tmp_path)
    for node in NODES:
        made.mount(node, f"{MEBIBYTES - 1}m" if node == "n3" else "500m")
    yield made
    for node in NODES:
        cluster.hosts.by_name[node].shell(f"while umount {made.local} 2>/dev/null; do :; done")


def test_ranks_start_from_the_disk_of_their_node(staged: Staged) -> None:
    local = str(staged.local)
    first, printed = staged.submit("--local-disk", local, "--keep-staged")
    assert printed.count("packing ") == (2 if BASE_STAYS else 3)
    text = staged.end(first)
    for rank in told(text):
        assert len(rank["from"]) >= 4 and all(map(staged.is_on_node, rank["from"])), rank
    assert [rank["host"] for rank in told(text)] == ["n1", "n2"] and "sbcast failed" not in text

    # The copy that was kept serves the next job: its archives are not read again, and would be refused.
    [archive] = (staged.folder / "runs" / ".environments").glob("venv-*.tar")
    archive.write_bytes(bytes(archive.stat().st_size))
    second, printed = staged.submit("--local-disk", local)
    assert "packing" not in printed
    text = staged.end(second)
    assert all(staged.is_on_node(place) for rank in told(text) for place in rank["from"])
    assert [staged.on(node, "ls", "-A", local).out for node in ("n1", "n2")] == ["", ""], "removed at the end"

    # A changed module is packed anew, and nothing else.
    (staged.folder / "sources" / "neighbour.py").write_text("changed = True\n")
    _, printed = staged.submit("--local-disk", "/no/such/disk")
    assert printed.count("packing ") == 1 and f"packing {staged.folder}/sources (1 files)" in printed


def test_a_full_or_missing_disk_leaves_its_ranks_in_the_shared_environment(staged: Staged) -> None:
    staged.cluster.hosts.by_name["n4"].shell(f"umount {staged.local}; mount -t tmpfs -o ro tmpfs {staged.local}")
    run, _ = staged.submit("--local-disk", str(staged.local), nodes=4)
    text = staged.end(run)
    assert f"tutti: n3: {staged.local} has {MEBIBYTES - 1} MiB free, the environment needs " in text
    assert f"tutti: n4: no folder can be made in '{staged.local}'. Ranks on this node use the shared" in text
    starts = {rank["host"]: rank["from"][0] for rank in told(text)}
    assert {host for host, place in starts.items() if place == str(staged.python)} == {"n3", "n4"}
    assert all(starts[host].startswith(str(staged.local)) for host in ("n1", "n2"))


def test_an_archive_that_is_damaged_or_gone_leaves_ranks_in_the_shared_environment(staged: Staged) -> None:
    run, _ = staged.submit("--local-disk", str(staged.local), "--directive=--begin=now+1hour", nodes=1)
    [archive] = (staged.folder / "runs" / ".environments").glob("venv-*.tar")
    archive.write_bytes(b"x" + archive.read_bytes()[1:])
    job = json.loads((run / "job.json").read_text())["ids"][0]
    assert staged.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now").code == 0
    text = staged.end(run)
    assert f"{archive.name} did not arrive. Ranks on this node use the shared environment." in text
    assert [rank["from"][0] for rank in told(text)] == [str(staged.python)]
