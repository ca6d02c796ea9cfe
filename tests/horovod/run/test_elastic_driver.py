"""The driver of elastic jobs: where workers go, which ranks they get, and how jobs end that never trained."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import environment
from prepared import PYTHON

from tutti.errors import LaunchError
from tutti.horovod.elastic.membership import Membership
from tutti.horovod.errors import HorovodInternalError
from tutti.horovod.run.arguments import ElasticOptions
from tutti.horovod.run.discovery import cool_down_of, read_script
from tutti.horovod.run.driver import run_elastic
from tutti.horovod.run.messages import Assignment, Notice, RankRequest, WorkerServer
from tutti.launch.elastic.slots import SlotPool
from tutti.launch.hosts import Candidate, Host, assign_ranks
from tutti.ranks.messages import connect, listen
from tutti.ranks.secret import make_secret

membership = sys.modules[Membership.__module__]  # its package has a function of this name
TWO = ElasticOptions(np=2, min_np=2, hosts=(Host("localhost", 2),))


def worker(number: int, host: str, slot: int, generation: int = -1, rank: int = -1, state: bool = False) -> Candidate:
    return Candidate(number, host, slot, generation, rank, state)


def ranks_of(workers: list[Candidate]) -> list[tuple[int, int, int, int, int, int]]:
    slots = assign_ranks(workers)
    return [
        (number, s.rank, s.size, s.local_rank, s.local_size, s.node_rank)
        for number, s in sorted(slots.items(), key=lambda item: item[1].rank)
    ]


# Ranks.


def test_the_first_workers_are_ranked_as_they_were_started() -> None:
    started = [worker(0, "a", 0), worker(1, "a", 1), worker(2, "b", 0)]
    assert ranks_of(started[::-1]) == [(0, 0, 3, 0, 2, 0), (1, 1, 3, 1, 2, 0), (2, 2, 3, 0, 1, 1)]


def test_survivors_keep_their_order_and_come_before_those_that_are_new() -> None:
    workers = [worker(4, "a", 0), worker(3, "c", 0, 2, 3), worker(1, "b", 0, 2, 1)]
    assert [number for number, *_ in ranks_of(workers)] == [1, 3, 4]


def test_rank_0_is_a_worker_that_knows_how_far_the_training_came() -> None:
    came_late = worker(1, "a", 0, 2, 0)
    trained = worker(2, "b", 0, 2, 1, state=True)
    stale = worker(0, "c", 0, 1, 0, state=True)  # it left a generation ago
    assert [number for number, *_ in ranks_of([stale, came_late, trained])] == [2, 1, 0]


def test_a_local_rank_is_the_slot_where_it_fits_so_that_workers_keep_their_gpus() -> None:
    survivors = [worker(0, "a", 0, 0, 0), worker(2, "a", 2, 0, 2), worker(3, "a", 3, 0, 3)]
    assert [local for _, _, _, local, _, _ in ranks_of(survivors)] == [0, 2, 1]
    whole = [*survivors, worker(4, "a", 1)]
    assert {number: local for number, _, _, local, _, _ in ranks_of(whole)} == {0: 0, 2: 2, 3: 3, 4: 1}


def test_messages_arrive_as_they_were_sent() -> None:
    secret = make_secret()
    server = WorkerServer(secret)
    port = server.start(listen(0, "127.0.0.1"))
    connection = connect("127.0.0.1", port, secret, keep_alive=False)
    connection.send("worker", worker=3)
    assert server.next(10) == (3, {"kind": "worker", "worker": 3})
    request = RankRequest(1, True)
    connection.send("request", **asdict(request))
    received = server.next(10)
    assert received == (3, {"kind": "request", "request": request})
    messages = connection.messages()
    for kind, sent in (("assignment", Assignment(2, 1, 4, skip_sync=True)), ("notice", Notice("lost", 3, "it died"))):
        server.send([3], kind, **asdict(sent))
        content = next(messages)
        assert (content.pop("kind"), type(sent)(**content)) == (kind, sent)
    server.close()
    assert next(messages, None) is None
    connection.close()


# Hosts.


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerServer, Membership]]:
    """A worker, and a driver that leaves its requests to the test."""
    secret = make_secret()
    monkeypatch.setenv("TUTTI_SECRET", secret.value.hex())
    monkeypatch.setattr(membership, "_PING_SECONDS", 0.05)
    server = WorkerServer(secret)
    worker = Membership(f"127.0.0.1:{server.start(listen(0, '127.0.0.1'))}", 3)
    yield server, worker
    worker._close()
    server.close()


def test_a_worker_waits_for_a_rank_only_as_long_as_the_driver_is_there(
    waiting: tuple[WorkerServer, Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_SILENT_SECONDS", 0.5)
    with pytest.raises(HorovodInternalError, match=r"has not answered worker 3 for 0\.5 s: it is stopped, or its host"):
        waiting[1]._request()


def test_a_worker_waits_on_while_the_driver_answers(waiting: tuple[WorkerServer, Membership]) -> None:
    server, worker = waiting
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker._request)
        pings = 0
        while pings < 3:
            number, message = server.next(60.0) or (-1, {"kind": "nothing"})
            assert message["kind"] != "nothing", "the worker does not ask whether the driver is there"
            pings += message["kind"] == "ping"
            server.send([number], "pong")
        server.send([3], "assignment", **asdict(Assignment(2, 0, 1, 0, 1, 0, 4711, "", False, request=1)))
        assert (answer.result().generation, answer.result().store_port) == (2, 4711)


@pytest.mark.system
def test_a_script_names_hosts_with_and_without_slots(tmp_path: Path) -> None:
    assert read_script("printf 'a\\n\\n b:4 \\na:1\\n'", 2) == [Host("a", 3), Host("b", 4)]
    script = tmp_path / "my hosts.sh"
    script.write_text('echo $(basename "$0" | wc -w).example:1\n')
    script.chmod(0o755)
    assert read_script(str(script), 1) == [Host("2.example", 1)]
    assert read_script("true", 1) == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("sh -c 'echo no such cluster >&2; exit 3'", r"ended with exit code 3: no such cluster\. Expected exit code 0"),
        ("echo a:many", r"printed 'a:many'\. Expected a line 'host' or 'host:slots'"),
        ("./no-such-script.sh", r"cannot be started: No such file or directory\. Give the path of a program"),
        ("echo a; echo b", r"printed 'a; echo b'\. Expected a line 'host' or 'host:slots'"),
    ],
)
def test_a_script_that_does_not_work_is_an_error_that_says_why(script: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_script(script, 1)


def pool(cooldown_range: tuple[float, float] | None) -> SlotPool[str]:
    made = SlotPool[str](cool_down_of(cooldown_range))
    for order, name in enumerate("ab"):
        made.add(name, name, 1, order)
    return made


def test_a_host_that_failed_is_not_used_twice_as_long_each_time() -> None:
    hosts = pool((10.0, 35.0))
    assert [hosts.fail("a", now) for now in (0.0, 5.0, 10.0, 30.0, 65.0)] == [10.0, 5.0, 20.0, 35.0, 35.0]
    assert hosts.cooling_hosts(99.0) == ["a"] and hosts.usable(99.0) == {"a": 0, "b": 1}
    assert hosts.usable(100.0) == {"a": 1, "b": 1}


def test_a_failure_is_remembered_while_a_host_is_not_in_the_job() -> None:
    hosts = pool((10.0, 35.0))
    hosts.fail("a", 0.0)
    hosts.add("a", "a", 0)
    assert hosts.usable(20.0) == {"a": 0, "b": 1}
    hosts.add("a", "a", 2)
    assert hosts.usable(5.0)["a"] == 0 and hosts.usable(20.0)["a"] == 2
    assert hosts.fail("a", 20.0) == 20.0


def test_without_a_range_a_host_that_failed_is_not_used_again() -> None:
    hosts = pool(None)
    assert hosts.fail("a", 0.0) == math.inf and hosts.fail("a", 1.0) == math.inf
    assert hosts.usable(1e12) == {"a": 0, "b": 1}


# Whole jobs, of programs that know nothing of the driver.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(TWO, np=1), r"-np 1 --min-np 2: expected 1 <= min-np <= np <= max-np"),
        (replace(TWO, max_np=1), r"--max-np 1: expected"),
        (replace(TWO, min_np=0), r"--min-np 0: expected"),
        (replace(TWO, np=3, min_np=3), r"the hosts have 2 slots.*give --host-discovery-script, or lower --min-np"),
        (replace(TWO, cooldown_range=(3.0, 2.0)), r"--blacklist-cooldown-range 3 2: expected 0 < MIN <= MAX"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(options: ElasticOptions, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run_elastic(options, ["true"])


@pytest.mark.system
def test_a_job_whose_workers_end_well_ends_well(capfd: pytest.CaptureFixture[str]) -> None:
    words = "echo $TUTTI_ELASTIC_WORKER $HOROVOD_ELASTIC $HOROVOD_HOSTNAME $HOROVOD_RANK $HOROVOD_SIZE"
    assert run_elastic(TWO, ["sh", "-c", words]) == 0
    lines = ["[0]<stdout>:0 1 localhost 0 2", "[1]<stdout>:1 1 localhost 1 2"]
    assert sorted(capfd.readouterr().out.splitlines()) == lines


@pytest.mark.system
def test_no_more_workers_than_max_np_are_started(capfd: pytest.CaptureFixture[str]) -> None:
    options = replace(TWO, hosts=(Host("localhost", 2), Host("127.0.0.1", 2)), max_np=3)
    assert run_elastic(options, ["sh", "-c", "echo $HOROVOD_HOSTNAME"]) == 0
    hosts = sorted(line.partition(":")[2] for line in capfd.readouterr().out.splitlines())
    assert hosts == ["127.0.0.1", "localhost", "localhost"]


@pytest.mark.system
def test_a_job_whose_workers_all_fail_ends_at_once_with_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    options = replace(TWO, cooldown_range=(100.0, 100.0), host_discovery_script="echo localhost:2")
    assert run_elastic(options, ["sh", "-c", "exit 7"]) == 1
    said = capfd.readouterr().err
    assert "(without a rank yet, host localhost) ended with exit code 7. No worker is started on localhost for" in said
    assert "the job has failed before it began: all workers have ended. The first failure: worker " in said
    sentence = "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
    assert f"{sentence}terminated. The first process to do so was:\nProcess name: localhost[" in said
    assert said.endswith("]\nExit code: 7\n")


@pytest.mark.system
def test_one_that_fails_beside_others_that_end_well_is_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_elastic(TWO, ["sh", "-c", "exit $TUTTI_ELASTIC_WORKER"]) == 1
    assert "worker 1 (without a rank yet, host localhost) ended with exit code 1" in capfd.readouterr().err


@pytest.mark.system
def test_too_few_slots_are_an_error_after_the_timeout(capfd: pytest.CaptureFixture[str]) -> None:
    options = replace(TWO, host_discovery_script="echo localhost", elastic_timeout=0.2)
    assert run_elastic(options, ["touch", "/never/started"]) == 1
    said = capfd.readouterr().err
    assert "0 slots, fewer than --min-np 2: waiting for more." in said
    assert "0 slots could be used for --elastic-timeout 0.2 s: expected 2 or more (--min-np)." in said
    assert "Hosts: localhost:1; not used after failures: none." in said


@pytest.mark.system
def test_too_few_slots_are_an_error_at_once_where_no_more_can_come(capfd: pytest.CaptureFixture[str]) -> None:
    options = replace(TWO, hosts=(Host("localhost", 1), Host("127.0.0.1", 1)))
    assert run_elastic(options, ["sh", "-c", "[ $HOROVOD_HOSTNAME = localhost ] && exit 1; sleep 600"]) == 1
    assert "1 slots could be used and no more can come: expected 2 or more" in capfd.readouterr().err


@pytest.mark.system
def test_a_worker_that_does_not_begin_in_time_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_elastic(replace(TWO, start_timeout=0.2), ["sleep", "600"]) == 1
    assert "has not called hvd.init() within --start-timeout 0.2 s" in capfd.readouterr().err


@pytest.mark.system
def test_the_first_words_of_a_broken_script_are_the_users_to_mend() -> None:
    with pytest.raises(LaunchError, match="ended with exit code 1"):
        run_elastic(replace(TWO, host_discovery_script="false"), ["true"])


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_driver(how: signal.Signals, tmp_path: Path) -> None:
    """The fixture that looks for processes left behind fails where one does."""
    source = (
        "import sys\n"
        "from tutti.horovod.run.driver import run_elastic\n"
        "from tutti.horovod.run.arguments import ElasticOptions\n"
        "from tutti.launch.hosts import Host\n"
        "options = ElasticOptions(np=2, min_np=2, hosts=(Host('localhost', 2),))\n"
        "sys.exit(run_elastic(options, ['sh', '-c', 'echo here; sleep 600 & wait']))\n"
    )
    driver = subprocess.Popen(
        [PYTHON, "-c", source], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    with driver.stdout as said:
        assert sorted([said.readline(), said.readline()]) == ["[0]<stdout>:here\n", "[1]<stdout>:here\n"]
        os.kill(driver.pid, how)
        assert driver.wait(30) == (-how if how == signal.SIGKILL else 128 + how)
