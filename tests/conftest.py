"""What the tests share: commands run to their end, one thread a rank, and a check that nothing is left behind."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import prepared
import pytest
from prepared import PYTHON
from waiting import wait_for_end

pytest_plugins = ["tiers"]

REPOSITORY = Path(__file__).parent.parent
# Real data, where a machine has it.
DATA = [Path(os.environ.get("TUTTI_DATA", REPOSITORY / "data")), REPOSITORY.parent / "shared" / "data"]
LONG = (
    "cluster",
    "frameworks",
    "horovod/keras",
    "test_docs",
    "test_examples",
    "train",
    "launch",
    "horovod/test_elastic",
)
LEFT_SECONDS = 60  # within which the kernel has ended the ranks of a launcher that was killed, however busy it is
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch in several workers would fight for the cores
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would outlive the tests
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # torch asks DNS for the names of its peers, 5 s each time
if not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are interpreted; triton reads it where it is imported
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime would keep events for its makers in the home folder
os.environ.setdefault("TUTTI_SECRET", secrets.token_hex(32))  # nothing is written into the home folder
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
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "COLUMNS": "200"}
    return kept | prepared.variables() | fixed | more


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call_tutti(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """A command of tutti in this process: its exit code, its output and its errors."""
    from tutti.cli.main import main

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tutti", *words])
        with pytest.raises(SystemExit) as end:
            main()
        caught = capsys.readouterr()
        return int(end.value.code or 0), caught.out, caught.err

    return run


def command(*words: str, cwd: Path, **env: str) -> Finished:
    """Run a command to its end; one that begins with PYTHON is forked from a process that has imported torch."""
    given = environment(**env)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(words, cwd=cwd, env=given, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

        def said() -> tuple[str, str]:
            return out.seek(0) or out.read(), err.seek(0) or err.read()

        try:
            code = wait_for_end(process, lambda: f"{' '.join(words)} does not end\n{''.join(said())}")
        finally:
            process.kill()
            process.wait()
        return Finished(code, *said())


@pytest.fixture
def tutti(tmp_path: Path) -> Tutti:
    """The command `tutti` in an empty folder."""

    def call(*words: str, **env: str) -> Finished:
        return command(PYTHON, "-m", "tutti", *words, cwd=tmp_path, **env)

    return call


@pytest.fixture
def mnist_folder() -> Path:
    """The real MNIST files; tests that need them are skipped where there are none."""
    for folder in DATA:
        if (folder / "mnist").is_dir():
            return folder / "mnist"
    pytest.skip("the real MNIST files are not on this machine: tutti data get mnist fetches them")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, so that no worker is left with one at the end.

    And have pytest 9.2 see the groups that xdist 3.8 writes into the names of tests, under an attribute that moved.
    """
    if not config.getoption("--shuffle"):
        items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
    for item in items:
        named = vars(item).get("_nodeid")
        if named is not None and hasattr(item, "_id") and item.nodeid != named:
            from _pytest.nodeid import coerce_node_id  # pyright: ignore[reportMissingImports]

            item._id = coerce_node_id(named)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every process that a test starts, at any depth, has ended when the test has."""
    from tiers import tier_of  # a plugin, which pytest imports itself

    yield
    if tier_of(request.node) == "logic":  # which starts none
        return
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := _marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


def _marked_processes() -> list[str]:
    """The commands of the processes that carry this session's mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.name != str(os.getpid()) and f"{_MARK}={os.environ[_MARK]}" in (folder / "environ").read_text():
                line = (folder / "cmdline").read_text().replace("\0", " ")
                if line and (folder / "comm").read_text().strip() != prepared.SERVER:  # from which programs are forked
                    found.append(line)
        except (OSError, UnicodeDecodeError):
            continue
    return found


_MARK = "TUTTI_TEST_SESSION"
os.environ[_MARK] = f"{os.getpid()}-{time.time()}"
