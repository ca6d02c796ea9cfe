"""Where runs of the campaign happen: local ranks, hosts on a network of their own, and a Slurm of four nodes.

Each is made of network, process and mount namespaces (tests/namespaces.py), so that all that a run leaves can be seen.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import namespaces
import prepared
import slurm
from conftest import environment
from namespaces import Host, Hosts

from fault_campaign.draw import LOCAL, NAMESPACES, RANKS, SLURM, Fault

RECIPE = "fault.yaml"
PORT = 29_411
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY")
_REQUEUE_SECONDS = 30.0
_BUSY = 0.02  # the share of a core that ranks which only wait stay below
_SYSTEM = ("tutti-prepared", "slurmd", "slurmctld", "munged", "slurmstepd", "bash", "sh", "sleep", "unshare")


@dataclass(frozen=True)
class Process:
    """A process of a host: its number here and there, its parent here, and its name."""

    pid: int
    inner: int
    parent: int
    name: str
    command: str


def processes(host: Host) -> list[Process]:
    """Return the processes in the process namespace of a host, its own first one left out."""
    space = _space(host.holder.pid, "pid_for_children")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.readlink(folder / "ns" / "pid") != space:
                continue
            text = (folder / "status").read_text()
            inner = int(re.search(r"^NSpid:.*?(\d+)$", text, re.MULTILINE)[1])  # pyright: ignore
            state = re.search(r"^State:\s+(\S)", text, re.MULTILINE)[1]  # pyright: ignore
            parent = int(re.search(r"^PPid:\s+(\d+)", text, re.MULTILINE)[1])  # pyright: ignore
            if inner > 1 and state != "Z":
                command = (folder / "cmdline").read_text().replace("\0", " ").strip()
                found.append(Process(int(folder.name), inner, parent, (folder / "comm").read_text().strip(), command))
    return sorted(found, key=lambda each: each.inner)


def _space(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


@dataclass
class Start:
    """Ranks that were started, under any launcher."""

    label: str
    outputs: list[Path]
    popens: list[subprocess.Popen] = field(default_factory=list)

    def poll(self) -> bool:
        """Return whether all of them have ended."""
        return all(each.poll() is not None for each in self.popens)

    @property
    def codes(self) -> list[int | None]:
        return [each.poll() for each in self.popens]

    def screen(self) -> str:
        """Return what they have printed up to now."""
        return "".join(path.read_text(errors="replace") for path in self.outputs if path.exists())


class Place:
    """Where one fault happens: it starts runs there, finds their processes, and says what is left of them."""

    name: str
    limit_seconds = 120.0  # in which a run that has not ended and has not computed hangs

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.folder, self.hosts = folder, hosts
        self.ranks = RANKS[self.name]
        self.starts: list[Start] = []
        self.variables: dict[str, str] = {}  # of the next start
        self.servers: slurm.Cluster | None = None  # from which programs are forked, on hosts that are not Slurm's

    def start(self, label: str, run: Path | None, *more: str) -> Start:
        """Begin a run, or resume the one in a folder; `more` are words of the command."""
        raise NotImplementedError

    def host_of_rank(self, rank: int) -> Host:
        raise NotImplementedError

    def own_hosts(self) -> list[Host]:
        return list(self.hosts.by_name.values())

    def own_variables(self, label: str) -> dict[str, str]:
        """Return what a run finds in its environment besides what is always there."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        own = {"FAULT_FOLDER": str(self.folder), "FAULT_START": label, "TMPDIR": str(self.folder / "tmp")}
        return own | {"COLUMNS": "200", "PYTHONPATH": str(self.folder)} | self.variables

    def run_folder(self) -> Path | None:
        """Return the newest run folder, if there is one."""
        found = sorted((self.folder / "runs").glob("fault/*/config.yaml"), key=lambda path: path.stat().st_mtime)
        return found[-1].parent if found else None

    def rank_process(self, rank: int) -> Process | None:
        """Return the newest process of a rank that has opened its trace."""
        told = [line for line in read_starts(self.folder) if line["rank"] == rank]
        if not told:
            return None
        newest = max(told, key=lambda line: line["time"])
        host = self.hosts.by_name[newest["host"]]
        return next((each for each in processes(host) if each.inner == newest["pid"]), None)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes that run here."""
        return sum(_cpu_seconds(each.pid) for host in self.own_hosts() for each in processes(host))

    def signal_rank(self, rank: int, number: int) -> bool:
        process = self.rank_process(rank)
        if process is None:
            if self.starts[-1].poll() or not read_starts(self.folder):
                return False
            raise RuntimeError(f"the process of rank {rank} is not found")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        return True

    def left(self) -> list[str]:
        """Return what runs have left: processes and shared memory."""
        found = []
        for host in self.own_hosts():
            found += [f"{each.name} on {host.name}: {each.command[:100]}" for each in processes(host) if _is_ours(each)]
            with contextlib.suppress(OSError):
                names = os.listdir(Path("/proc", str(host.holder.pid), "root", "dev", "shm"))  # as that host sees it
                found += [f"/dev/shm/{name} on {host.name}" for name in names]
        return found

    def end_all(self) -> None:
        """End every process of the runs, as at the end of a fault."""
        for host in self.own_hosts():
            for each in processes(host):
                if _is_ours(each):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each.pid, signal.SIGKILL)
        for start in self.starts:
            for popen in start.popens:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    popen.wait(20)

    def _popen(self, host: Host, words: Sequence[str], env: Mapping[str, str], output: Path) -> subprocess.Popen:
        line = host.enter("setsid", *words)
        line[line.index(f"--wd={os.getcwd()}")] = f"--wd={self.folder}"
        with open(output, "ab") as out:
            return subprocess.Popen(line, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _is_ours(process: Process) -> bool:
    return not process.name.startswith(_SYSTEM)


class Local(Place):
    """`tutti train -n 2` by a user, on a host of its own."""

    name = LOCAL
    python = prepared.PYTHON  # or an interpreter that imports torch itself, which takes seconds

    def start(self, label: str, run: Path | None, *more: str) -> Start:
        words = [self.python, "-m", "tutti", "train", str(run or RECIPE), "-n", str(self.ranks), *more]
        output = self.folder / f"screen-{label}.txt"
        start = Start(label, [output])
        self.starts.append(start)
        start.popens = [self._popen(self.host_of_rank(0), words, environment(**self.own_variables(label)), output)]
        return start

    def host_of_rank(self, rank: int) -> Host:
        return next(iter(self.hosts.by_name.values()))

    def launcher(self) -> Process | None:
        """Return the process that a user has started, once it is there."""
        found = processes(self.host_of_rank(0))
        servers = {each.pid for each in found if each.name == prepared.SERVER}
        if self.python == prepared.PYTHON:  # forked from the server, which does not show its words
            return next((each for each in found if each.parent in servers and each.pid not in servers), None)
        return next((each for each in found if " -m tutti train" in each.command and " -c " not in each.command), None)

    def with_all_below(self, process: Process) -> list[Process]:
        """Return a process, those that it has started, and those that they have."""
        found, known = [process], {process.pid}
        for each in processes(self.host_of_rank(0)):  # in the order of their start
            if each.parent in known:
                found.append(each)
                known.add(each.pid)
        return found

    def fork_server(self) -> Process | None:
        """Return the process from which the ranks are forked."""
        found = processes(self.host_of_rank(0))
        above = {each.parent for each in found if each.name.startswith("tutti rank")}
        return next((each for each in found if each.pid in above), None)


class Namespaces(Place):
    """A rank on each of two hosts, started as torchrun starts ranks."""

    name = NAMESPACES

    def start(self, label: str, run: Path | None, *more: str) -> Start:
        start = Start(label, [])
        self.starts.append(start)
        for rank in range(self.ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"GROUP_RANK": str(rank), "MASTER_ADDR": self.host_of_rank(0).address, "MASTER_PORT": str(PORT)}
            output = self.folder / f"screen-{label}-{rank}.txt"
            start.outputs.append(output)
            words = [prepared.PYTHON, "-m", "tutti", "train", str(run or RECIPE)]
            host = self.host_of_rank(rank)
            start.popens.append(self._popen(host, words, environment(**self.own_variables(label)) | place, output))
        return start

    def host_of_rank(self, rank: int) -> Host:
        return list(self.hosts.by_name.values())[rank]


class SlurmStart(Start):
    """A submitted run, requeued by its job script as often as that decides."""

    cluster: slurm.Cluster
    job = ""
    _lost_since: float | None = None

    def poll(self) -> bool:
        state = self.state
        if state != "NODE_FAIL":  # in which a job is for a moment before it is requeued
            self._lost_since = None
            return state in _ENDED
        self._lost_since = self._lost_since or time.monotonic()
        return time.monotonic() - self._lost_since > _REQUEUE_SECONDS

    @property
    def state(self) -> str:
        return self.cluster.job(self.job).get("JobState", "COMPLETED")

    @property
    def codes(self) -> list[int | None]:
        code = self.cluster.job(self.job).get("ExitCode", "0:0").split(":")
        return [int(code[0]) or (-int(code[1]) if self.state != "COMPLETED" else 0) or int(self.state != "COMPLETED")]


class Slurm(Place):
    """`tutti submit` to three nodes of four; the job is requeued as its script decides."""

    name = SLURM
    limit_seconds = 300.0
    cluster: slurm.Cluster

    def start(self, label: str, run: Path | None, *more: str) -> Start:
        tutti = [prepared.PYTHON, "-m", "tutti"]
        if run is None:
            words = [*tutti, "submit", RECIPE, "--on", "slurm", "--nodes", str(self.ranks), "--ranks-per-node", "1"]
            words += ["--time", "5"]
        else:
            words = ["sbatch", "--parsable", str(run / "job.sh")]
        done = self.cluster.run(*words, cwd=self.folder, env=self.own_variables(label))
        (self.folder / f"screen-{label}.txt").write_text(done.all)
        folder = self.run_folder()
        start = SlurmStart(label, [self.folder / f"screen-{label}.txt"])
        start.cluster = self.cluster
        if done.code or folder is None:
            raise RuntimeError(f"nothing was submitted: {done.all}")
        start.job = json.loads((folder / "job.json").read_text())["ids"][-1] if run is None else done.out.strip()
        start.outputs += [folder / "logs" / f"job-{start.job}.out"]
        self.starts.append(start)
        return start

    def host_of_rank(self, rank: int) -> Host:
        told = [line for line in read_starts(self.folder) if line["rank"] == rank]
        return self.hosts.by_name[max(told, key=lambda line: line["time"])["host"]]

    def own_hosts(self) -> list[Host]:
        return [self.hosts.by_name[node] for node in slurm.NODES]

    def end_all(self) -> None:
        self.cluster.run("scancel", "--user=root", "--signal=KILL", "--full")
        self.cluster.run("scancel", "--user=root")
        super().end_all()


def read_starts(folder: Path) -> list[dict]:
    """Return the first line of every trace: which rank was started where."""
    found = []
    for path in folder.glob("trace-*.jsonl"):
        with contextlib.suppress(ValueError, IndexError):
            found.append(json.loads(path.read_text().splitlines()[0]))
    return found


@contextlib.contextmanager
def opened(fault: Fault, folder: Path, cluster: slurm.Cluster | None, fresh: bool = False) -> Iterator[Place]:
    """A place for one fault; on Slurm, the nodes of a cluster, which are idle again afterwards.

    Python programs are forked from a server that has imported torch; with `fresh`, local ones have an interpreter.
    """
    if fault.place == SLURM:
        assert cluster is not None
        place = Slurm(folder, cluster.hosts)
        place.cluster = cluster
        try:
            yield place
        finally:
            place.end_all()
            for node in slurm.NODES:
                if cluster.node_state(node) != "idle" or not _link_is_up(cluster.hosts.by_name[node]):
                    cluster.restore(node)
            cluster.clear()
        return
    count = 1 if fault.place == LOCAL else RANKS[fault.place]
    names = [f"{fault.place[0]}{fault.index + 1}h{number + 1}" for number in range(count)]  # servers go by them
    with namespaces.hosts(names) as hosts:
        place = Local(folder, hosts) if fault.place == LOCAL else Namespaces(folder, hosts)
        servers = slurm.Cluster(hosts)
        if isinstance(place, Local) and fresh:
            place.python = sys.executable
        else:
            place.servers = servers
            for name in hosts:
                servers.start_server(name)
        try:
            yield place
        finally:
            place.end_all()
            for name in hosts:
                servers.end_server(name)


def _link_is_up(host: Host) -> bool:
    with contextlib.suppress(AssertionError):
        host.shell("ip link show eth0 up | grep -q eth0")
        return True
    return False


def hold_port(host: Host, talks: bool) -> subprocess.Popen:
    """Have a stranger listen on the port of the rendezvous; returns once it does."""
    program = (
        "import socket, sys\n"
        f"server = socket.create_server(('', {PORT}))\n"
        "print('up', flush=True)\n"
        "kept = []\n"
        "while True:\n"
        "    caller, _ = server.accept(); kept.append(caller)\n"
        f"    caller.sendall(b'220 hello\\r\\n') if {talks} else None\n"
    )
    words = host.enter(sys.executable, "-ISc", program)
    found = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert found.stdout and found.stdout.readline() == b"up\n"
    return found


def wait_for(start: Start, place: Place) -> bool:
    """Wait until a start has ended; returns False when it has not and its processes have hardly computed meanwhile."""
    deadline, used = time.monotonic() + place.limit_seconds, place.cpu_seconds()
    while not start.poll():
        if time.monotonic() > deadline:
            now = place.cpu_seconds()
            if now - used < _BUSY * place.limit_seconds:
                return False
            deadline, used = time.monotonic() + place.limit_seconds, now
        time.sleep(0.05 if not isinstance(start, SlurmStart) else 0.5)
    return True
