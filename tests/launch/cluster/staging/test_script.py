"""The script of the nodes: what is in it, and what it does on hosts that copy from each other."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import namespaces
import pytest
from conftest import environment
from namespaces import Hosts
from small_environment import make_environment
from waiting import wait_until

from tutti.errors import LaunchError
from tutti.launch.cluster.resources import load_site
from tutti.launch.cluster.staging.archive import Archive, Packed, pack
from tutti.launch.cluster.staging.environment import Environment, EnvironmentLayer, find_environment
from tutti.launch.cluster.staging.script import DEFAULT_DISK, Staging, choose_staging, render

GOLDEN = Path(__file__).parent.parent / "golden" / "stage.txt"


def script() -> str:
    """The values of a script, without what is the same in all."""
    layers = (
        EnvironmentLayer("prefix", Path("/home/me/venv")),
        EnvironmentLayer("path-0", Path("/home/me/my project")),
    )
    site_packages = "lib/python3.11/site-packages"
    found = Environment(
        layers, "/usr/bin/python3.11", None, True, False, site_packages, ("path-0",), (), {"/work": "path-0"}
    )
    archives = (Archive("venv-1.tar", "a" * 64, 5 << 20, 9, 4 << 20), Archive("my-project-2.tar", "b" * 64, 10, 1, 5))
    packed = Packed(found, "0123456789abcdef", Path("/scratch/me/runs/.environments"), archives)
    text = render(Staging("$SCRATCH/me", keep=True), packed, "/home/me/venv/bin/python", Path("/work"), Path("/run"))
    return text.partition("\n\n")[0] + "\n"


def test_the_values_of_an_environment_are_the_golden_ones() -> None:
    assert script() == GOLDEN.read_text()


def test_what_the_command_line_leaves_open_is_the_sites() -> None:
    site = load_site("slurm")
    assert choose_staging(site) is None
    assert choose_staging(site, True) == Staging(DEFAULT_DISK, keep=False)
    own = site.model_copy(update={"stage_environment": True, "local_disk": "/local", "keep_staged": True})
    assert choose_staging(own) == Staging("/local", keep=True)
    assert choose_staging(own, disk="/nvme") == Staging("/nvme", keep=True)
    assert choose_staging(own, False) is None


def test_what_cannot_be_staged_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"--local-disk scratch: expected an absolute path .* '\$SLURM_TMPDIR'"):
        choose_staging(load_site("slurm"), True, "scratch")
    with pytest.raises(LaunchError, match="need --stage-environment"):
        choose_staging(load_site("slurm"), None, "/local")
    with pytest.raises(LaunchError, match=r"ranks run in a container \(shifter\)"):
        choose_staging(load_site("perlmutter-shifter"), True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts with disks of their own, which reach each other by ssh; only the first sees the folder of archives."""
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    server, client, keys = "/usr/sbin/sshd", shutil.which("ssh"), shutil.which("ssh-keygen")
    if not (Path(server).exists() and client and keys):
        pytest.skip("openssh-server or openssh-client is not installed here")
    Path("/run/sshd").mkdir(exist_ok=True)  # which its service would make
    folder = tmp_path / "ssh"
    for each in ("ssh", "local", "cache"):
        (tmp_path / each).mkdir()
    for name in ("host", "user"):
        subprocess.run([keys, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    options = f"-i {folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {client} {options} "$@"\n')
    (folder / "ssh").chmod(0o755)
    (folder / "config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        f"SetEnv PATH={folder}:/usr/bin:/bin\n"
    )
    with namespaces.hosts(4) as made:
        servers = []
        for name, host in made.by_name.items():
            host.shell(f"mount -t tmpfs -o size=50m tmpfs {tmp_path}/local")
            if name != "h1":
                host.shell(f"mount -t tmpfs tmpfs {tmp_path}/cache")
            servers.append(made.start(name, [server, "-D", "-e", "-f", str(folder / "config")], {"PATH": os.defpath}))
        words = [str(folder / "ssh"), "-o", "BatchMode=yes"]
        for name in made:
            wait_until(lambda name=name: made.run("h1", [*words, name, "true"]).code == 0, lambda: "no ssh")
        yield made
        for each in servers:
            each.terminate()
            each.communicate()


@pytest.mark.system
def test_hosts_without_slurm_send_the_archives_to_each_other(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = make_environment(tmp_path)
    found = find_environment(str(python))
    layers = tuple(layer for layer in found.layers if layer.name != "base")  # as where every host has Python itself
    found = replace(found, layers=layers, python=os.path.realpath(python), library=None)
    packed = pack(found, tmp_path / "cache")
    local = tmp_path / "local"
    text = render(Staging(str(local)), packed, str(python), tmp_path, tmp_path)
    (tmp_path / "stage.sh").write_text(text)
    (tmp_path / "nodes").write_text("".join(f"{name}\n{name}\n" for name in hosts))
    given = environment(PBS_NODEFILE=str(tmp_path / "nodes"), PATH=f"{tmp_path / 'ssh'}:{os.environ['PATH']}")

    def call(host: str, *words: str) -> str:
        done = hosts.run(host, ["bash", str(tmp_path / "stage.sh"), *words], given, tmp_path)
        assert done.code == 0, done.all
        return done.all

    assert "".join(call(name, "prepare", "7") for name in hosts) == ""
    assert call("h1", "broadcast", "7") == ""
    assert "".join(call(name, "unpack", "7") for name in hosts) == ""
    for name in hosts:
        told = json.loads(call(name, "run", "-m", "tutti", "train"))
        assert told["host"] == name and all(place.startswith(str(local)) for place in told["from"][:3]), told
    line = hosts.by_name["h1"].enter("bash", str(tmp_path / "stage.sh"), "run", "-c", "print(flush=True); input()")
    with subprocess.Popen(line, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout and rank.stdout.readline() == "\n"
        call("h1", "remove", "7")
        assert hosts.run("h1", ["ls", "-A", str(local)]).out, "a rank of another job still uses the copy"
        rank.communicate("\n")
    call("h1", "remove", "7")
    assert hosts.run("h1", ["ls", "-A", str(local)]).out == ""
    call("h2", "remove", "7")
    assert json.loads(call("h2", "run", "-m", "tutti", "train"))["from"][0] == str(python)
    assert hosts.run("h2", ["ls", "-A", str(local)]).out == ""
