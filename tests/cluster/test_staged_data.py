"""A run on three hosts that stages a packed dataset from a network file system with a slow link."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import shared_folder
from rank_jobs import read_ledger
from slurm import LOGIN, TUTTI, Cluster, wait_until

from tutti.config.load import load
from tutti.config.plan import make_plan
from tutti.data.make_images import make_images
from tutti.data.order import SampleOrder
from tutti.data.packed.encode import PackOptions
from tutti.data.packed.index import PackedSamples
from tutti.data.packed.sources import open_source
from tutti.data.packed.write import pack

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]
NODES = ("n1", "n2", "n3")
SLOW = "tc qdisc replace dev eth0 root tbf rate 40mbit burst 64kb latency 50ms"
RECIPE = """
data: {{name: images, path: {source}, size: 24, workers: 0, stage: "$DISK_OF_TEST"}}
model: {{name: small_cnn, width: 4}}
optim: {{name: sgd, lr: 0.01}}
batch: {{global: 4, eval: 2}}
seed: {seed}
epochs: 2
log: {{every_steps: 1, ledger: true, tensorboard: false}}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tree = make_images(tmp_path / "tree", classes=2, train=12, valid=2, size=64)
    pack(partial(open_source, str(tree)), str(tree), tmp_path / "source", PackOptions(size=32, shard_mb=0.01))
    return tmp_path / "source"


@pytest.fixture
def slow(cluster: Cluster, tmp_path: Path, source: Path) -> Iterator[Path]:
    """The packed folder, which the login host serves over a slow link; its last shard is held until `go` is there."""
    if reason := shared_folder.unavailable():
        pytest.skip(reason)
    hosts, local = cluster.hosts, tmp_path / "local"
    local.mkdir()
    for node in NODES:
        hosts.by_name[node].shell(f"mount -t tmpfs -o size={'8m' if node == 'n3' else '200m'} tmpfs {local}")
    hosts.by_name[LOGIN].shell(SLOW)
    last = sorted(source.glob("train-*.tar"))[-1].name
    with shared_folder.mounted(hosts, LOGIN, NODES, source, hold=last, go=str(tmp_path / "go")):
        yield source
    hosts.by_name[LOGIN].shell("tc qdisc del dev eth0 root")
    for node in NODES:
        hosts.by_name[node].shell(f"umount {local}")


def write_recipe(folder: Path, source: Path) -> SampleOrder:
    """A recipe whose first step needs no sample of the last shard; the order of its samples."""
    shards = PackedSamples(source, "train").index.records["shard"]
    for seed in range(100):
        (folder / "images.yaml").write_text(RECIPE.format(source=source, seed=seed))
        order = SampleOrder(make_plan(load(str(folder / "images.yaml")), 1, len(shards)), seed)
        if shards[order.rank_ids(0, 0)].max() < shards.max():
            return order
    raise AssertionError("every seed has a sample of the last shard in its first step")


def said(run: Path) -> dict[str, list[str]]:
    """What the ranks of each host have said of their data; ranks 0 and 1 are on n1."""
    logs = {int(path.stem.removeprefix("rank-")): path.read_text() for path in run.glob("logs/rank-*.log")}
    found: dict[str, list[str]] = {node: [] for node in NODES}
    for rank in sorted(logs):
        found[NODES[max(0, rank - 1)]] += re.findall(r"^.*data: .*$", logs[rank], re.MULTILINE)
    return found


def test_shards_are_copied_once_a_host_while_the_run_trains(cluster: Cluster, slow: Path, tmp_path: Path) -> None:
    """n1 has two ranks and a disk, the disk of n2 vanishes, that of n3 is full."""
    order = write_recipe(tmp_path, slow)
    local, go = tmp_path / "local", tmp_path / "go"
    words = f"srun --nodes=3 --ntasks=4 --kill-on-bad-exit=0 {TUTTI} train images.yaml"
    options = ["--nodes=3", "--ntasks=4", "--ntasks-per-node=2"]
    text = f"export DISK_OF_TEST={local}\nunset SLURM_NTASKS_PER_NODE\n{words}\n"
    job = cluster.submit(text, tmp_path, *options)
    wait_until(lambda: "step 1/" in cluster.output(job, tmp_path), lambda: cluster.output(job, tmp_path))
    [run] = (tmp_path / "runs" / "images").iterdir()
    shards = len(list(slow.glob("train-*.tar")))
    first = "\n".join(said(run)["n1"])
    assert "-train-" not in first, "the first step is made before the last shard is there"
    cluster.hosts.by_name["n2"].shell(f"umount --lazy {local}; mount -t tmpfs tmpfs {local}")
    go.touch()
    ended = cluster.wait(job)
    printed = cluster.output(job, tmp_path)
    assert ended["JobState"] == "COMPLETED", printed
    record = json.loads((run / "record.json").read_text())
    assert record["state"] == "finished" and record["segments"][0]["hosts"] == ["n1", *NODES]
    told = said(run)
    staged = [line for line in told["n1"] if "all shards are staged" in line]
    copied = [int(re.findall(r": (\d+) shards? \(", line)[0]) for line in staged]
    assert sorted(copied) == sorted([shards, len(list(slow.glob("validation-*.tar")))]), (
        "each once, by one of two ranks"
    )
    assert all(line.endswith(", 0 found there") for line in staged)
    assert any("is gone" in line or "cannot be staged" in line for line in told["n2"]), told
    assert any("are free there" in line and "read from the source" in line for line in told["n3"]), told
    whole = {step + 1: order.rank_ids(step, 0).tolist() for step in range(len(read_ledger(run)))}
    assert read_ledger(run) == whole and len(whole) == 12
    assert [cluster.run("ls", "-A", str(local), host=node).out for node in NODES] == [""] * 3, "removed at the end"
