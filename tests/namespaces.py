"""Hosts on one machine: each has a name, addresses, processes and a link of its own, and all end with their test."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conftest import Finished, environment

_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "hostname", "mount", "bash")
_UNSHARE = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# The first process of a host waits for orphans, so that their CPU time is counted, and ends with its input: then the
# kernel ends all others of the host.
_LIFE = (
    'hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && echo up '
    "&& exec bash --norc -c 'while read -r _; do :; done'"
)
_SYSTEM = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def unavailable() -> str | None:
    """Why hosts cannot be made here, or nothing."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=_SYSTEM["PATH"]) is None]:
        return f"{', '.join(missing)} not installed here (as root: apt-get install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "hosts on one machine are network namespaces, which only root may make"
    tried = subprocess.run([*_UNSHARE, "ip", "link", "add", "br0", "type", "bridge"], env=_SYSTEM, capture_output=True)
    return f"no namespaces or bridges here: {tried.stderr.decode().strip()}" if tried.returncode else None


@dataclass
class Host:
    """A name, an address, and the process that keeps the namespaces."""

    name: str
    address: str
    holder: subprocess.Popen[str]

    def enter(self, *words: str) -> list[str]:
        """The command line that runs words on this host, and ends them when it is ended itself."""
        holder = self.holder.pid
        kinds = [f"--{kind}=/proc/{holder}/ns/{file}" for kind, file in _NAMESPACES.items()]
        return ["nsenter", *kinds, f"--wd={os.getcwd()}", "setpriv", "--pdeathsig", "KILL", *words]

    def shell(self, text: str) -> None:
        """Run lines of the system's own set-up, and fail with them."""
        done = subprocess.run(self.enter("sh", "-ec", text), env=_SYSTEM, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {done.stderr}"

    def end(self) -> None:
        """End all that runs on this host, as when it loses its power."""
        self.holder.kill()
        self.holder.communicate()


_NAMESPACES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}


@dataclass
class Hosts:
    """Hosts by name, on one network."""

    folder: Path
    by_name: dict[str, Host] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def address(self, host: str) -> str:
        return self.by_name[host].address

    def start(self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None):
        """Start a command on a host; its output is to be read from pipes."""
        words = self.by_name[host].enter(*command)
        if cwd:
            words[words.index(f"--wd={os.getcwd()}")] = f"--wd={cwd}"
        given = environment() if env is None else dict(env)
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=given, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def run(
        self,
        host: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """Run a command on a host to its end."""
        with self.start(host, command, env, cwd) as process:
            try:
                out, err = process.communicate()
            except BaseException:
                process.kill()
                raise
        return Finished(process.returncode, out, err)

    def end(self, host: str) -> None:
        """Take a host away, with all that runs on it."""
        self.by_name[host].end()


@contextlib.contextmanager
def hosts(
    count: int | Sequence[str],
    rate: str | None = None,
    slow: Mapping[str, str] | None = None,
    network: str = "10.80.0",
) -> Iterator[Hosts]:
    """Hosts h1, h2, ... (or of the given names) on a switch; `slow` gives some links another rate than `rate`.

    They have what confuses rendezvous on real clusters: a host's own name leads to 127.0.1.1, as on Debian, and docker0
    has the same address everywhere.
    """
    names = [f"h{number}" for number in range(1, count + 1)] if isinstance(count, int) else list(count)
    with tempfile.TemporaryDirectory(prefix="tutti-hosts-") as folder, contextlib.ExitStack() as stack:
        made = Hosts(Path(folder))
        addresses = {name: f"{network}.{number}" for number, name in enumerate(names, start=1)}
        for name in (*names, "switch"):
            host = _begin(name, addresses, Path(folder))
            stack.callback(host.end)
            made.by_name[name] = host
        for host in made.by_name.values():
            assert host.holder.stdout and host.holder.stdout.readline() == "up\n", f"{host.name} does not come up"
        switch = made.by_name.pop("switch")
        switch.shell("ip link add br0 type bridge; ip link set br0 up")
        for number, host in enumerate(made.by_name.values(), start=1):
            _connect(host, switch, f"p{number}", (slow or {}).get(host.name, rate))
        yield made


def _begin(name: str, addresses: Mapping[str, str], folder: Path) -> Host:
    table = "".join(f"{address} {other}\n" for other, address in addresses.items() if other != name)
    path = folder / f"hosts-{name}"
    own = f"{addresses[name]} {name}.cluster\n" if name in addresses else ""
    path.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{own}{table}")
    words = [*_UNSHARE, "sh", "-c", _LIFE, name, str(path)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(words, env=_SYSTEM, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    return Host(name, addresses.get(name, ""), holder)


def _connect(host: Host, switch: Host, port: str, rate: str | None) -> None:
    ends = f"eth0 netns {host.holder.pid} type veth peer name {port} netns {switch.holder.pid}"
    subprocess.run(["ip", "link", "add", *ends.split()], env=_SYSTEM, check=True)
    network = host.address.rpartition(".")[0] + ".0/24"
    limit = f"root tbf rate {rate} burst 128kb latency 50ms"
    host.shell(
        f"ip link set lo up; ip addr add {host.address}/24 dev eth0; ip link set eth0 up\n"
        f"ip route replace {network} dev eth0 src {host.address} congctl cubic\n"
        "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up\n"
        + (f"tc qdisc replace dev eth0 {limit}" if rate else "")
    )
    switch.shell(f"ip link set {port} master br0 up\n" + (f"tc qdisc replace dev {port} {limit}" if rate else ""))
