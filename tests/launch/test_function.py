"""`tutti.launch`: a function on ranks from a script or a notebook, its results, and its failures."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared
import pytest
from conftest import environment
from prepared import PYTHON
from waiting import wait_for_end, wait_until

import tutti
from tutti.errors import ConfigError, FunctionFailed

CELLS = """
import os, signal, threading, time
import torch.distributed as dist
from tutti.ranks.environments import discover

OFFSET = 5

class Place:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

def meet(number):
    placement = discover(os.environ)
    dist.init_process_group("gloo")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, number + OFFSET + dist.get_rank())
    print(f"rank {dist.get_rank()} has met all")
    dist.barrier()
    dist.destroy_process_group()
    return Place(placement.rank, placement.world_size), found

def fail_on_one(how):
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        print("about to fail", flush=True)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the grid has 0 cells")
    dist.barrier()
    time.sleep(1000)  # until it is ended

def give_back_a_lock():
    return threading.Lock()

def leave():
    os._exit(0)
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function as one of a notebook's cells, which no rank can import; ranks are forked from a prepared process."""
    monkeypatch.setattr(sys, "executable", PYTHON)
    for name, value in prepared.variables().items():
        monkeypatch.setenv(name, value)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(CELLS, namespace)
    return namespace.__getitem__


@pytest.mark.ranks
def test_ranks_find_each_other_and_their_results_return_in_order(
    cell: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK"):  # of a launcher around this program
        monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    results = tutti.launch(cell("meet"), 10, ranks=2)
    assert [(place.rank, place.size, found) for place, found in results] == [(0, 2, [15, 16]), (1, 2, [15, 16])]
    assert capsys.readouterr().out == "rank 0 has met all\n"
    assert dict(os.environ) == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("error", ["rank 1: ValueError: the grid has 0 cells", "in fail_on_one"]),
        ("signal", ["rank 1: ended by signal SIGKILL before the function returned", "| about to fail"]),
    ],
)
def test_the_failure_of_a_rank_ends_all_and_has_its_traceback(
    how: str, said: list[str], cell: Callable[[str], Any]
) -> None:
    with pytest.raises(FunctionFailed) as failed:
        tutti.launch(cell("fail_on_one"), how, ranks=2)
    assert failed.value.rank == 1
    assert all(text in str(failed.value) for text in said)


@pytest.mark.ranks
def test_a_rank_without_a_result_is_a_failure(cell: Callable[[str], Any]) -> None:
    with pytest.raises(FunctionFailed, match=r"rank 0: TypeError: cannot pickle '_thread.lock' object"):
        tutti.launch(cell("give_back_a_lock"), ranks=1)
    with pytest.raises(FunctionFailed, match=r"rank 0: ended with exit code 0 before the function returned"):
        tutti.launch(cell("leave"), ranks=1)


SCRIPT = """
import os, pathlib, time, tutti

def stay():
    rank = os.environ["RANK"]
    pathlib.Path(f"unfinished-{rank}").write_text(str(os.getpid()))
    pathlib.Path(f"unfinished-{rank}").rename(f"rank-{rank}")
    time.sleep(1000)

tutti.launch(stay, ranks=2)
"""


@pytest.mark.ranks
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with (tmp_path / "output").open("w") as output:
        script = subprocess.Popen(
            [sys.executable, "script.py"], cwd=tmp_path, env=environment(), stdout=output, stderr=output
        )
    said = (tmp_path / "output").read_text
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() for file in files), said, script)
    script.send_signal(signal.SIGINT)
    assert wait_for_end(script, said) == -signal.SIGINT
    assert "KeyboardInterrupt" in said()
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("function", "ranks", "said"),
    [
        (len, 0, "ranks=0: expected a number of ranks, 1 or more. Try ranks=2."),
        (len, 2.5, "ranks=2.5: expected a number of ranks"),
        (len, True, "ranks=True: expected a number of ranks"),
        ("meet", 2, "tutti.launch: 'meet' is a str: expected a function to call."),
    ],
)
def test_what_cannot_be_called_on_ranks_is_refused(function: Any, ranks: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tutti.launch(function, ranks=ranks)
    assert said in str(refused.value)


def test_what_cannot_be_sent_is_refused_with_its_name(
    cell: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"meet or its arguments cannot be sent to the ranks: cannot pickle"):
        tutti.launch(cell("meet"), threading.Lock())
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"meet is defined in the main program.*install cloudpickle"):
        tutti.launch(cell("meet"), 1)
