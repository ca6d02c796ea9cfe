"""What the tests share: commands with a deadline, ranks with one thread, and a check that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
# Real data, where a machine has it.
DATA = [Path(os.environ.get("TUTTI_DATA", REPOSITORY / "data")), REPOSITORY.parent / "shared" / "data"]
DEADLINE_SECONDS = 240
LONG = ("cluster", "frameworks", "hvd/keras", "test_docs", "test_examples", "train", "launch", "hvd/test_elastic")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch in several workers would fight for the cores
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would outlive the tests
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has what it starts in its background ignore


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


Tutti = Callable[..., Finished]


def environment(**more: str) -> dict[str, str]:
    """A user's environment without launchers, with one thread a rank."""
    launcher = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "OMPI_",
        "PMI_",
        "PMIX_",
        "SLURM_",
        "TORCHELASTIC_",
        "HOROVOD_",
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "COLUMNS": "200"} | more


def command(*words: str, cwd: Path, deadline_seconds: int = DEADLINE_SECONDS, **env: str) -> Finished:
    """Run a command to its end."""
    done = subprocess.run(
        words, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=deadline_seconds, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def tutti(tmp_path: Path) -> Tutti:
    """The command `tutti` in an empty folder."""

    def call(*words: str, **env: str) -> Finished:
        return command(sys.executable, "-m", "tutti", *words, cwd=tmp_path, **env)

    return call


@pytest.fixture
def mnist_folder() -> Path:
    """The real MNIST files; tests that need them are skipped where there are none."""
    for folder in DATA:
        if (folder / "mnist").is_dir():
            return folder / "mnist"
    pytest.skip("the real MNIST files are not on this machine: tutti data get mnist fetches them")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that no worker is left with one at the end.

    And have pytest 9.2 see the groups that xdist 3.8 writes into the names of tests, under an attribute that moved.
    """
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
    for item in items:
        named = vars(item).get("_nodeid")
        if named is not None and hasattr(item, "_id") and item.nodeid != named:
            from _pytest.nodeid import coerce_node_id  # pyright: ignore[reportMissingImports]

            item._id = coerce_node_id(named)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Every process that a test starts, at any depth, has ended when the test has."""
    newest = _newest_process()
    yield
    if _newest_process() == newest:  # nobody has started any
        return
    deadline = time.monotonic() + 10  # the kernel takes a moment to end the ranks of a launcher that was killed
    while (left := _marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


def _newest_process() -> str:
    """The number that this machine has given to a process or thread last."""
    return Path("/proc/loadavg").read_text().split()[-1]


def _marked_processes() -> list[str]:
    """The commands of the processes that carry this session's mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.name != str(os.getpid()) and f"{_MARK}={os.environ[_MARK]}" in (folder / "environ").read_text():
                line = (folder / "cmdline").read_text().replace("\0", " ")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                # The server from which the tests' own ranks are forked, and its tracker, stay.
                if line and not ("from multiprocessing." in line and parent == os.getpid()):
                    found.append(line)
        except (OSError, UnicodeDecodeError):
            continue
    return found


_MARK = "TUTTI_TEST_SESSION"
os.environ[_MARK] = f"{os.getpid()}-{time.time()}"
