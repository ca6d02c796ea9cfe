"""What the tests share: commands with a deadline, ranks with one thread, and a check that nothing is left behind."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
MNIST = REPOSITORY.parent / "shared" / "data" / "mnist"  # real data, where a machine has it
DEADLINE_SECONDS = 240


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
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TUTTI_", "TORCHELASTIC_")
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
    if not MNIST.is_dir():
        pytest.skip("the real MNIST files are not on this machine")
    return MNIST


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Every process that a test starts has ended when the test has."""
    yield
    left = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False).stdout.split()
    running = [pid for pid in left if "pgrep" not in _command_of(pid) and _command_of(pid)]
    assert not running, f"left behind: {[_command_of(pid) for pid in running]}"


def _command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
