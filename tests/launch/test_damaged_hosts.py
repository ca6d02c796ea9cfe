"""Lists of hosts that are damaged in any way are read or refused by name."""

from pathlib import Path

import pytest
from damage import damaged, many, read_or_refuse
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import LaunchError
from tutti.launch.hosts import Host, assign_slots, parse_hosts, read_hostfile

HOSTFILE = b"n1 slots=2\n# others\nn2:4\n\nn3.site.org slots = 8 max_slots=16\nn4\n"


@many(150)
@given(content=damaged(HOSTFILE))
def test_a_damaged_file_of_hosts_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    check(read_or_refuse(lambda: read_hostfile(str(path)), path))


@many(150)
@given(text=st.text(max_size=20) | damaged(b"n1:2,n2:4,n3").map(lambda content: content.decode(errors="replace")))
def test_any_list_of_hosts_is_read_or_refused(text: str) -> None:
    check(read_or_refuse(lambda: parse_hosts(text), f"-H {text}"))


@pytest.mark.parametrize("slots", ["9" * 10, "9" * 5000])
def test_a_number_of_slots_that_no_host_has_is_refused(tmp_path: Path, slots: str) -> None:
    with pytest.raises(LaunchError, match=r"is no host. Expected host:slots"):
        parse_hosts(f"n1:{slots}")
    (tmp_path / "hosts").write_text(f"n1 slots={slots}\n")
    with pytest.raises(LaunchError, match=r"hosts, line 1: .* Expected a line such as 'h1 slots=2'"):
        read_hostfile(str(tmp_path / "hosts"))


def check(hosts: list[Host] | None) -> None:
    if hosts is not None:
        assert hosts and all(host.slots >= 1 for host in hosts)
        assert len(assign_slots(hosts, 1)) == 1
