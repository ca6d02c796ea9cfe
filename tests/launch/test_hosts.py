"""The hosts of a job: where launchers listen, how ports are kept, and what ssh is told."""

import socket
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.launch import hosts
from tutti.launch.hosts import Ssh, address_for, listening_address, parse_hosts, read_hostfile, reserve_port
from tutti.ranks.messages import listen


def test_a_reserved_port_can_only_be_used_by_a_server_that_was_told_of_it() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        for address in ("127.0.0.1", ""):
            listen(port, address).close()


def test_a_launcher_listens_where_its_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening_address(["localhost", "127.0.0.1"], (), others_may_come=False) == "127.0.0.1"
    assert listening_address(["localhost"], (), others_may_come=True) == ""
    assert listening_address(["localhost"], ("lo",), others_may_come=True) == "127.0.0.1"
    with pytest.raises(LaunchError, match="--network-interfaces no-such0: "):
        listening_address(["localhost"], ("no-such0",), others_may_come=False)
    sources = {"n1": "10.0.0.5", "n2": "10.0.0.5", "n3": "10.1.0.5", "n4": None}
    monkeypatch.setattr(hosts, "is_local", lambda name: name not in sources)
    monkeypatch.setattr(hosts, "_source_towards", sources.get)
    assert listening_address(["localhost", "n1", "n2"], (), others_may_come=False) == "10.0.0.5"
    assert listening_address(["n1", "n3"], (), others_may_come=False) == ""
    assert listening_address(["n4"], (), others_may_come=False) == ""
    assert [address_for(host, "") for host in ("localhost", "n3")] == ["127.0.0.1", "10.1.0.5"]
    assert address_for("localhost", "10.0.0.5") == "10.0.0.5"


@pytest.mark.system
@pytest.mark.parametrize(
    ("configured", "told"),
    [("ask", "accept-new"), (None, "accept-new"), ("true", None), ("false", None), ("accept-new", None)],
)
def test_the_users_configuration_decides_about_the_keys_of_hosts(
    configured: str | None, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"echo stricthostkeychecking {configured}" if configured else "exit 255"
    (tmp_path / "ssh").write_text(f'#!/bin/sh\n[ "$1 $2" = "-G {configured}.site" ] || exit 1\n{line}\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = Ssh().words(f"{configured}.site")
    assert [word for word in words if "StrictHostKeyChecking" in word] == (
        [f"StrictHostKeyChecking={told}"] if told else []
    )


@pytest.mark.parametrize("name", ["-oProxyCommand", "-v", "--", "h1;reboot", "$(reboot)", "h1 h2"])
def test_a_name_that_ssh_or_a_shell_would_take_for_more_is_no_host(name: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is no host"):
        parse_hosts(f"{name}:1")
    (tmp_path / "hosts").write_text(f"{name} slots=2\n")
    with pytest.raises(LaunchError, match="line 1"):
        read_hostfile(str(tmp_path / "hosts"))
