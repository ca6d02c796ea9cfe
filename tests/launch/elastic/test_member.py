"""What a host that joins an elastic job takes from the other side, and what it refuses."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tutti.cli.elastic import Program, _listening_address
from tutti.config.load import resolve
from tutti.errors import LaunchError
from tutti.launch.elastic import agent
from tutti.launch.elastic.member import Member, Offer
from tutti.launch.elastic.slots import RoundShare
from tutti.ranks.messages import Connection
from tutti.ranks.placement import Placement
from tutti.ranks.secret import SECRET_VARIABLE, make_secret
from tutti.runs.folder import RunFolder

OFFER = Offer(slots=2, recipe="digits", overrides=[], version="1", order=1)
WELCOME = {"folder": "/runs/1", "line": "tutti train digits", "job": "a1"}
SHARE = {"round": 1, "first_rank": 3, "ranks": 2, "world_size": 5, "host": 1, "hosts": 2, "port": 20_000}
END = {"kind": "end", "code": 0, "text": "done"}


class Leader:
    """The other end of a connection, which says what it is told to."""

    def __init__(self, *says: dict[str, Any]) -> None:
        self.says, self.heard = says, list[str]()

    def send(self, kind: str, **_: Any) -> None:
        self.heard.append(kind)

    def messages(self) -> Iterator[dict[str, Any]]:
        yield from self.says

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RoundShare, list[str], dict[str, str]]]:
    """The shares and commands of the ranks that a host starts, in place of ranks, with their environment."""
    found = []

    class Agent:
        def __init__(self, share: RoundShare, address: str, arguments: list[str], at_end: Any) -> None:
            found.append((share, arguments, dict(os.environ)))

        def kill(self) -> None:
            pass

        def wait(self, seconds: float) -> None:
            pass

    monkeypatch.setattr(os, "environ", {"PATH": os.defpath})
    monkeypatch.setattr(agent, "Agent", Agent)
    return found


def member(*says: dict[str, Any]) -> Member:
    connection = cast("Connection", Leader(*says))
    return Member(connection, "first", make_secret(), lambda folder: ["-m", "tutti", "train", str(folder)])


def test_ranks_run_the_command_of_their_own_host_with_a_secret_of_the_job(
    started: list[tuple[RoundShare, list[str], dict[str, str]]],
) -> None:
    host = member({"kind": "welcome", "welcome": WELCOME}, {"kind": "round", "share": SHARE}, END)
    assert host.run(OFFER) == (0, "done")
    share, arguments, environment = started[0]
    assert (share, arguments) == (RoundShare(**SHARE), ["-m", "tutti", "train", "/runs/1"])
    assert environment.pop(SECRET_VARIABLE) == host._secret.key("ranks of job a1").hex()
    given = {"TUTTI_RUN_FOLDER": "/runs/1", "TUTTI_LAUNCH_LINE": "tutti train digits"}
    assert environment.items() >= given.items()
    assert environment.keys() - given.keys() == {"PATH", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}


@pytest.mark.parametrize(
    "says",
    [
        {"kind": "welcome", "welcome": WELCOME | {"arguments": ["-c", "import os"]}},
        {"kind": "welcome", "welcome": WELCOME | {"environment": {"LD_PRELOAD": "evil.so"}}},
        {"kind": "welcome", "welcome": WELCOME | {"folder": "runs/1"}},
        {"kind": "welcome", "welcome": WELCOME | {"line": 3}},
        {"kind": "welcome", "welcome": None},
        {"kind": "round", "share": SHARE | {"ranks": 3}},
        {"kind": "round", "share": SHARE | {"ranks": 0}},
        {"kind": "round", "share": SHARE | {"host": 2}},
        {"kind": "round", "share": SHARE | {"first_rank": 4}},
        {"kind": "round", "share": SHARE | {"first_rank": -1}},
        {"kind": "round", "share": SHARE | {"address": "evil.example"}},
        {"kind": "round", "share": SHARE | {"port": 1 << 16}},
        {"kind": "round", "share": {"round": 1}},
    ],
    ids=str,
)
def test_what_is_not_valid_ends_the_host_and_starts_nothing(
    says: dict[str, Any], started: list[tuple[RoundShare, list[str], dict[str, str]]]
) -> None:
    first = [] if says["kind"] == "welcome" else [{"kind": "welcome", "welcome": WELCOME}]
    code, text = member(*first, says, END).run(OFFER)
    assert code == 2 and "at first, has sent a message that is not valid: " in text
    assert started == [] and "LD_PRELOAD" not in os.environ


def test_what_is_not_expected_is_ignored(started: list[tuple[RoundShare, list[str], dict[str, str]]]) -> None:
    says = [{"kind": "round", "share": SHARE}, {"kind": "kill"}, {"kind": "run", "command": "true"}, {"kind": "end"}]
    assert member(*says, END).run(OFFER) == (0, "done")
    assert started == []
    assert member().run(OFFER) == (76, "the first launcher of this job, at first, was lost.")


def made_run(folder: Path, recipe: str) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(resolve(recipe, []).config.as_yaml())
    return folder


def test_a_host_trains_in_the_folder_of_a_job_only_what_it_was_given(tmp_path: Path) -> None:
    config = resolve("digits", []).config
    same, other = made_run(tmp_path / "same", "digits"), made_run(tmp_path / "other", "digits/mlp")
    given = Program("digits", config, ["epochs=2"], None)
    assert given.arguments(same) == ["-m", "tutti", "train", str(same)]
    with pytest.raises(LaunchError, match=r"the job trains 'digits/mlp' in .*other, and this host was given digits: "):
        given.arguments(other)
    with pytest.raises(LaunchError, match=r"the run folder .*none cannot be seen on host"):
        given.arguments(tmp_path / "none")
    resumed = Program(str(same), config, ["epochs=2"], RunFolder(same))
    assert resumed.arguments(same) == ["-m", "tutti", "train", str(same), "epochs=2"]
    assert resumed.offer(1, 0).overrides == ["epochs=2"] and given.offer(1, 0).overrides == []
    with pytest.raises(LaunchError, match="Join the job with its own recipe"):
        resumed.arguments(made_run(tmp_path / "copy", "digits"))


def test_hosts_can_join_at_the_interface_of_the_job_where_one_is_given() -> None:
    alone, together = Placement("none"), Placement("srun", 0, 4)
    assert _listening_address(alone) == ""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,eth7"
    assert (_listening_address(alone), _listening_address(together)) == ("127.0.0.1", "")
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such0"
    assert _listening_address(alone) == ""
