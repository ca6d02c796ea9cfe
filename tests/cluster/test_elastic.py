"""Elastic training under a real srun: one launcher on each node, and a node that is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_jobs import read_ledger
from slurm import TUTTI, Cluster, record_of, wait_until

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("slurm")]
PARTS = """
import time
from pathlib import Path
from tutti.data.builtin import digits

class Slow:
    '''The digits, slow until they may be fast.'''

    def __init__(self, split, shift=0):
        self.data, self.split = digits(split), split
        self.input_shape, self.num_classes = (1, 8, 8), 10

    def __len__(self):
        return len(self.data)

    def batch(self, ids, draws):
        if self.split == "train" and not Path("fast").exists():
            time.sleep(0.3)
        return self.data.batch(ids, draws)
"""


@pytest.fixture
def node(cluster: Cluster) -> Iterator[str]:
    """A node that a test may lose; Slurm may not have noticed when the test is over."""
    yield "n3"
    cluster.run("scancel", "--user=root")
    cluster.restore("n3")


def test_a_node_that_is_lost_in_silence_is_survived_by_the_others(cluster: Cluster, node: str, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    options = "data.name=parts:Slow model.width=4 epochs=2 batch.global=96 log.every_steps=2 checkpoint.every_steps=3"
    line = f"{TUTTI} train digits --min-ranks 2 --max-ranks 3 log.ledger=true {options}"
    words = "-N3", "--ntasks-per-node=1", "--no-kill"
    job = cluster.submit(f"srun --no-kill --kill-on-bad-exit=0 {line}", tmp_path, *words)

    def wait_for(words: str) -> None:
        wait_until(lambda: words in cluster.output(job, tmp_path), lambda: cluster.output(job, tmp_path))

    wait_for("step 4/28")
    cluster.lose(node)
    wait_for("now on 2 ranks (rank lost: 2 on host n3, which was lost)")
    (tmp_path / "fast").touch()
    wait_for("run folder:")
    record = record_of(tmp_path)
    assert record["state"] == "finished"
    assert [segment["hosts"] for segment in record["segments"]] == [["n1", "n2", "n3"], ["n1", "n2"]]
    ledger = read_ledger(next((tmp_path / "runs" / "digits").iterdir()))
    assert list(ledger) == list(range(1, 29))
    for epoch in (0, 14):
        seen = [i for step in range(epoch + 1, epoch + 15) for i in ledger[step]]
        assert len(seen) == len(set(seen)) == 14 * 96
