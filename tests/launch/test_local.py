"""Ranks on this machine: where their output goes, and how the failure of one ends all with a clear word."""

import json
import os
import textwrap
from pathlib import Path

import pytest
from conftest import Tutti

from tutti.ranks.secret import make_secret

pytestmark = pytest.mark.ranks

PARTS = """
    import os, signal
    from tutti.data.builtin import digits

    class Trouble:
        '''The digits, until the given rank has read enough of them.'''

        def __init__(self, split, rank=1, by="error"):
            self.data, self.split, self.rank, self.by, self.count = digits(split), split, rank, by, 0
            self.input_shape, self.num_classes = (1, 8, 8), 10

        def __len__(self):
            return len(self.data)

        def batch(self, ids, draws):
            self.count += 1
            if self.split == "train" and self.count == 5 and os.environ["RANK"] == str(self.rank):
                print("about to stop", flush=True)
                if self.by == "signal":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError("the scratch disk is gone")
            return self.data.batch(ids, draws)
"""


def write(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text))


def test_ranks_of_one_host_meet_at_its_loopback_address_with_a_secret_of_their_own(
    tutti: Tutti, tmp_path: Path
) -> None:
    write(
        tmp_path / "look.py",
        """
        import os, pathlib
        port = f"{int(os.environ['MASTER_PORT']):04X}"
        lines = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/net/{file}")]
        print([line[1].removesuffix(f":{port}") for line in lines if line[1].endswith(f":{port}") and line[3] == "0A"])
        pathlib.Path("secret-" + os.environ["RANK"]).write_text(os.environ["TUTTI_SECRET"])
        """,
    )
    given = make_secret()
    done = tutti("run", "-n", "2", "look.py", **given.environment())
    assert done.code == 0, done.all
    assert "['0100007F']\n" in done.out
    first, second = ((tmp_path / f"secret-{rank}").read_text() for rank in range(2))
    assert first == second != given.value.hex() and len(first) == 64
    files = [path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not any(first in content for content in [*files, done.all])


def test_every_rank_has_a_log_and_rank_0_the_screen(tutti: Tutti, tmp_path: Path) -> None:
    write(
        tmp_path / "hello.py",
        """
        import atexit, os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} says {sys.argv[1:]}", flush=True)
        os.write(1, b"from below\\n")
        dist.barrier()  # a rank that leaves early would close connections that others still make
        dist.destroy_process_group()
        atexit.register(print, "at the end", flush=True)
        """,
    )
    done = tutti("run", "-n", "3", "hello.py", "--words", "a b")
    assert done.code == 0, done.all
    assert "rank 0 of 3 says ['--words', 'a b']" in done.out
    assert "rank 1 of 3" not in done.out
    folder = next((tmp_path / "runs" / "hello").iterdir())
    for rank in range(3):
        log = (folder / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 3 says" in log and log.rstrip().endswith("at the end")
    assert "from below" in (folder / "logs" / "rank-2.log").read_text()


def test_a_script_that_fails_on_one_rank_ends_all_and_names_it(tutti: Tutti, tmp_path: Path) -> None:
    write(
        tmp_path / "fails.py",
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("rank 1 has had enough")
        time.sleep(600)
        """,
    )
    done = tutti("run", "-n", "2", "fails.py")
    assert done.code == 1
    assert "rank 1 on host" in done.err
    assert "| ValueError: rank 1 has had enough" in done.err
    assert "rank-1.log" in done.err


@pytest.mark.parametrize(
    ("by", "said"), [("error", "OSError: the scratch disk is gone"), ("signal", "ended by signal SIGKILL")]
)
def test_training_ends_on_all_ranks_when_one_fails(tutti: Tutti, tmp_path: Path, by: str, said: str) -> None:
    write(tmp_path / "parts.py", PARTS)
    done = tutti("train", "digits", "-n", "2", "data.name=parts:Trouble", f"data.by={by}", PYTHONPATH=str(tmp_path))
    assert done.code == 1
    assert f"rank 1 on host {json.loads(_record(tmp_path).read_text())['segments'][0]['host']} failed" in done.err
    assert said in done.err
    assert "| about to stop" in done.err
    assert "Traceback" not in done.out
    record = json.loads(_record(tmp_path).read_text())
    assert record["state"] == "failed"
    assert said in record["failure"]


def test_rank_0_failing_is_told_once(tutti: Tutti, tmp_path: Path) -> None:
    write(tmp_path / "parts.py", PARTS)
    done = tutti("train", "digits", "-n", "2", "data.name=parts:Trouble", "data.rank=0", PYTHONPATH=str(tmp_path))
    assert done.code == 1
    assert done.err.count("OSError: the scratch disk is gone. ") == 1
    assert "rank 0 on host" in done.err


def test_threads_are_divided_among_ranks_unless_set(tutti: Tutti, tmp_path: Path) -> None:
    write(tmp_path / "threads.py", "import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    assert "threads 3\n" in tutti("run", "-n", "2", "threads.py", OMP_NUM_THREADS="3").out
    expected = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"threads {expected}\n" in tutti("run", "-n", "2", "threads.py", OMP_NUM_THREADS="").out


def _record(folder: Path) -> Path:
    return next(folder.rglob("record.json"))
