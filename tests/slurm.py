"""A real Slurm for tests: four nodes and a login host, each a host of its own on this machine, up in about a second."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import namespaces
import prepared
from conftest import Finished, environment
from namespaces import Hosts
from prepared import PYTHON
from waiting import wait_until as wait_until

NODES = ("n1", "n2", "n3", "n4")
LOGIN = "login"
WORK = f"{PYTHON} {Path(__file__).parent / 'cluster_work.py'}"
TUTTI = f"{PYTHON} -m tutti"
Told = list[dict[str, Any]]
_DAEMONS = ("slurmctld", "slurmd", "munged")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")

# A requeued job waits for cred_expire, a lost node is noticed after SlurmdTimeout: both are minutes by default.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=login({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MessageTimeout=5
SlurmdTimeout=5
NodeName=n[1-4] NodeAddr={network}.[1-4] CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=2000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str | None:
    """Why there is no Slurm here, or nothing."""
    if missing := [name for name in _DAEMONS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]:
        return f"{', '.join(missing)} not installed here (as root: apt-get install slurm-wlm munge)"
    return namespaces.unavailable()


class Cluster:
    """What a user does on the login host, and what an administrator fears."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder
        self.settings = {"SLURM_CONF": f"{self.folder}/slurm.conf"}
        self._servers: dict[str, prepared.Program] = {}

    def run(
        self,
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        host: str = LOGIN,
    ) -> Finished:
        """Run a user's command on the login host, or another, to its end."""
        given = environment(**self.settings, **(env or {}))
        return self.hosts.run(host, words, given, cwd)

    def submit(self, text: str, cwd: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Hand in a batch script; the job's id. Its output goes to `job-ID.out` in `cwd`."""
        script = cwd / "submitted.sh"
        script.write_text(f"#!/bin/bash\n{text}")
        done = self.run("sbatch", "--parsable", "--output=job-%j.out", *options, str(script), cwd=cwd, env=env)
        assert done.code == 0, done.all
        return done.out.strip()

    def output(self, job: str, cwd: Path) -> str:
        """What a job that was submitted in `cwd` has printed up to now."""
        path = cwd / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by Slurm's names; a job that Slurm does not know is empty."""
        shown = self.run("scontrol", "-o", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", shown.out)) if shown.code == 0 else {}

    def wait(self, job: str, *states: str) -> dict[str, str]:
        """What Slurm says of a job once it is in one of the states, by default an end."""
        wanted = states or _ENDED
        return wait_until(
            lambda: found if (found := self.job(job)).get("JobState") in wanted else None,
            lambda: f"job {job} is not {' or '.join(wanted)}: {self.job(job)}",
        )

    def finish(self, text: str, cwd: Path, *options: str, state: str = "COMPLETED") -> str:
        """Hand in a script and wait for the state in which it is to end; what it has printed."""
        job = self.submit(
            text, cwd, *options, env={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        )
        ended = self.wait(job)
        printed = self.output(job, cwd)
        assert ended["JobState"] == state, printed
        return printed

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-n", node, "-o", "%T").out.strip()

    def signal(self, node: str, daemon_signal: str) -> None:
        """Send a signal to a node's slurmd alone; the steps that it has started live on."""
        self.hosts.by_name[node].shell(f"kill -{daemon_signal} $(cat {self.folder}/slurmd-{node}.pid)")

    def lose(self, node: str) -> None:
        """Cut a node off in silence, and end all that runs on it."""
        self.hosts.by_name[node].shell("ip link set eth0 down; kill -KILL -1")

    def restore(self, node: str) -> None:
        """Bring a node back, whatever was done to it, and wait until Slurm may use it."""
        self.hosts.by_name[node].shell("kill -KILL -1 || true; ip link set eth0 up")
        self.start_slurmd(node)
        self.wait_for_node(node)

    def start_server(self, host: str) -> None:
        """Have Python programs on a host forked there, from a server that has imported torch."""
        self.end_server(host)
        here = prepared.server()
        address = here.folder / host
        address.unlink(missing_ok=True)
        holder = self.hosts.by_name[host].holder.pid
        self._servers[host] = program = here.start(prepared.serve_on_host, holder, str(address))
        wait_until(address.exists, lambda: f"no server on {host}", program)

    def end_server(self, host: str) -> None:
        if program := self._servers.pop(host, None):
            program.kill()
            program.wait()

    def start_slurmd(self, node: str) -> None:
        self.start_server(node)
        self.hosts.by_name[node].shell(f"SLURM_CONF={self.folder}/slurm.conf slurmd -N {node}")

    def wait_for_node(self, node: str) -> None:
        """Wait until a node is idle."""
        wait_until(
            lambda: self.node_state(node) == "idle",
            lambda: f"{node} is {self.node_state(node)}\n{self.log(f'slurmd-{node}')}",
        )

    def clear(self) -> None:
        """Cancel all jobs, bring back all nodes, and wait until they are idle."""
        self.run("scancel", "--user=root")
        self.run("scancel", "--user=root", "--signal=KILL")
        for node in NODES:
            if "down" in self.node_state(node):
                self.restore(node)
            self.wait_for_node(node)

    def log(self, daemon: str) -> str:
        """The last lines of a daemon's log, for the message of a failing test."""
        path = self.folder / f"{daemon}.log"
        return "\n".join(path.read_text().splitlines()[-20:]) if path.exists() else f"{path} is not there"


def told(text: str) -> Told:
    """The lines that ranks of cluster_work.py have told, in the order of ranks."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: line["rank"])


def record_of(folder: Path) -> dict[str, Any]:
    """The record of the only run in a folder's `runs`."""
    [run] = (folder / "runs").glob("*/*")
    return json.loads((run / "record.json").read_text())


@contextlib.contextmanager
def running(rate: str | None = None) -> Iterator[Cluster]:
    """A cluster with idle nodes, on links of a rate; nothing of it is left afterwards."""
    network = "10.80.0"
    with namespaces.hosts([*NODES, LOGIN], rate=rate, network=network) as hosts:
        cluster = Cluster(hosts)
        login = hosts.by_name[LOGIN]
        text = _CONFIGURATION.format(folder=hosts.folder, network=network, login=login.address)
        hosts.folder.chmod(0o755)  # munged asks for that
        (hosts.folder / "slurm.conf").write_text(text)
        (hosts.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (hosts.folder / "state").mkdir()
        (hosts.folder / "munge.key").write_bytes(os.urandom(128))
        (hosts.folder / "munge.key").chmod(0o600)
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        munge = " ".join(f"--{flag}={hosts.folder}/{file}" for flag, file in files.items())
        login.shell(f"munged {munge} --num-threads=2; SLURM_CONF={hosts.folder}/slurm.conf slurmctld -c")
        cluster.start_server(LOGIN)
        for node in NODES:
            cluster.start_slurmd(node)
        for node in NODES:
            cluster.wait_for_node(node)
        try:
            yield cluster
        finally:
            for host in (LOGIN, *NODES):
                cluster.end_server(host)
