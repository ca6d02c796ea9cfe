"""horovodrun with real ranks: here, over ssh, by mpirun, and how all of them end."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod_call_work as work
import intruder
import pytest
from conftest import Finished, command, environment
from intruder import Intruder, intruding, processes_in, recorded_in
from prepared import PYTHON
from rank_jobs import reserved_port
from waiting import wait_for_end, wait_until

from tutti.errors import ConfigError
from tutti.horovod.elastic.membership import Membership
from tutti.horovod.errors import HorovodInternalError
from tutti.horovod.run import call
from tutti.ranks.messages import connect, listen
from tutti.ranks.secret import make_secret

pytestmark = pytest.mark.ranks

OTHER_HOST = "127.0.0.2"  # reaches this machine, and is taken for another
REDUCE = """
import os, torch
import tutti.horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
print(" ".join(map(str, ("sum", total, "place", *place, os.environ.get("MY_SETTING")))))
"""
TELL = "import os, sys; print('out', os.environ['HOROVOD_RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""
# Ranks that add ones until they are told that it is enough, and say where their driver is.
ADD = """
import os, pathlib, time, torch
import tutti.horovod.torch as hvd
import intruder
intruder.record_sent(pathlib.Path("."))
hvd.init()
print("driver", os.environ["TUTTI_ELASTIC_ADDRESS"], flush=True)
steps, wrong, enough = 0, 0, 0.0
while not enough:
    steps += 1
    time.sleep(0.02)
    wrong += hvd.allreduce(torch.ones(100), op=hvd.Sum, name="ones").sum().item() != 100 * hvd.size()
    enough = hvd.allreduce(torch.tensor([float(os.path.exists("enough"))]), op=hvd.Min, name="enough").item()
print("wrong", wrong, "size", hvd.size(), flush=True)
"""
# A rank that looks for the secret of its job in the command lines of this machine, also in encoded words.
LOOK = """
import base64, os, pathlib, re
secret = os.environ["TUTTI_SECRET"]
pathlib.Path("secret-" + os.environ["RANK"]).write_text(secret)
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        line = path.read_text(errors="replace")
    except OSError:
        continue
    for word in re.findall(r"[A-Za-z0-9+/=]{40,}", line):
        line += base64.b64decode(word[: len(word) // 4 * 4]).decode(errors="replace")
    if secret in line:
        print("the secret is in the command line of", path)
"""
# A rank with a child of its own; the files say that both are there.
WAIT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("here-" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


def horovodrun(*words: str, cwd: Path, **env: Any) -> Finished:
    return command(PYTHON, "-m", "tutti.horovod.run.command", *words, cwd=cwd, **env)


def program(text: str) -> list[str]:
    return [PYTHON if text is REDUCE else sys.executable, "-c", text]


@pytest.fixture(scope="module")
def ssh_port() -> Iterator[int]:
    with reserved_port(OTHER_HOST) as port:
        yield port


@pytest.fixture(scope="module")
def ssh(ssh_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], dict[str, str]]]:
    """An ssh server of this user alone: the flags that reach it, and a PATH with an ssh that notes no host keys."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if not (Path(server).exists() and shutil.which("ssh") and shutil.which("ssh-keygen")):
        pytest.skip("openssh-server or openssh-client is not installed here")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # which its service would make
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "config").write_text(
        f"Port {ssh_port}\nListenAddress {OTHER_HOST}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\n"
    )
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -o UserKnownHostsFile=/dev/null "$@"\n')
    (folder / "ssh").chmod(0o755)
    log = (folder / "log").open("w")
    process = subprocess.Popen([server, "-D", "-e", "-f", folder / "config"], stderr=log, env={"PATH": os.defpath})
    flags = ["-p", str(ssh_port), "-i", str(folder / "user")]
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    try:
        options = ["-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes"]
        words = [str(folder / "ssh"), *flags, *options, OTHER_HOST, "true"]

        def answers() -> bool:
            return process.poll() is not None or not subprocess.run(words, capture_output=True, check=False).returncode

        wait_until(answers, (folder / "log").read_text)
        if process.poll() is not None:
            pytest.skip(f"no ssh server can be started here: {(folder / 'log').read_text()}")
        yield flags, env
    finally:
        process.terminate()
        process.wait()
        log.close()


def test_two_ranks_add_up_and_lines_carry_their_rank(tmp_path: Path) -> None:
    done = horovodrun("-np", "2", *program(REDUCE), cwd=tmp_path)
    assert done.code == 0, done.all
    assert "[0]<stdout>:sum 3.0 place 0 2 0 2 0 1 None\n" in done.out
    assert "[1]<stdout>:sum 3.0 place 1 2 1 2 0 1 None\n" in done.out


def test_output_goes_to_the_screen_and_to_files(tmp_path: Path) -> None:
    flags = ["-np", "2", "--output-filename", "logs", "-prefix-timestamp", "--verbose", "--autotune"]
    done = horovodrun(*flags, *program(TELL), cwd=tmp_path)
    assert done.code == 0, done.all
    for rank in range(2):
        assert (tmp_path / f"logs/rank.{rank}/stdout").read_text() == f"out {rank}\n"
        assert (tmp_path / f"logs/rank.{rank}/stderr").read_text() == f"err {rank}\n"
        stamped = next(line for line in done.out.splitlines() if line.endswith(f"[{rank}]<stdout>:out {rank}"))
        time.strptime(stamped.partition("[")[0])
        assert f"[{rank}]<stderr>:err {rank}\n" in done.err
    assert done.err.count("ignored, since they have no effect here: --autotune") == 1
    assert "rank 1 on host localhost: " in done.err


def test_one_failing_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    done = horovodrun("-np", "3", *program(FAIL), cwd=tmp_path)
    assert done.code == 1
    assert "rank 1 on host localhost ended with exit code 3; the other ranks were ended." in done.err
    assert "Horovod detected that one or more processes exited with non-zero status" in done.err
    assert "Process name: 1\nExit code: 3" in done.err


def test_a_killed_rank_and_a_missing_program_are_told(tmp_path: Path) -> None:
    killed = horovodrun("-np", "1", *program("import os; os.kill(os.getpid(), 9)"), cwd=tmp_path)
    assert killed.code == 1
    assert "rank 0 on host localhost was ended by signal SIGKILL" in killed.err
    missing = horovodrun("-np", "1", "no-such-program", cwd=tmp_path)
    assert missing.code == 1
    assert "no-such-program: not found" in missing.err and "ended with exit code 127" in missing.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=lambda each: str(each)
)
def test_ranks_and_their_children_end_with_the_launcher(number: int, code: int, tmp_path: Path) -> None:
    assert _ended_by(number, ["-np", "2"], {}, tmp_path) == code


def test_a_rank_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FAIL}"
    done = horovodrun("-np", "2", *program(deaf), cwd=tmp_path)
    assert done.code == 1, done.all


def test_ranks_on_another_host_join_by_ssh(ssh: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    flags, env = ssh
    (tmp_path / "work.py").write_text(REDUCE)
    for hosts, others in ((f"localhost:1,{OTHER_HOST}:1", "1"), (f"{OTHER_HOST}:1,localhost:1", "0")):
        words = ["-np", "2", "-H", hosts, *flags, "--output-filename", "logs", PYTHON, "work.py"]
        done = horovodrun(*words, cwd=tmp_path, MY_SETTING="it's\n$HOME", **env)
        assert done.code == 0, done.all
        for rank in range(2):
            said = (tmp_path / f"logs/rank.{rank}/stdout").read_text()
            assert said == f"sum 3.0 place {rank} 2 0 1 {rank} 2 it's\n$HOME\n", f"{others} is over ssh"


def test_the_secret_of_a_job_is_its_own_and_in_no_command_line(
    ssh: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    flags, env = ssh
    given = make_secret()
    (tmp_path / "look.py").write_text(LOOK)
    words = ["-np", "2", "-H", f"localhost:1,{OTHER_HOST}:1", "--verbose", *flags, sys.executable, "look.py"]
    done = horovodrun(*words, cwd=tmp_path, **env | given.environment())
    assert done.code == 0 and "the secret is in" not in done.all, done.all
    first, second = ((tmp_path / f"secret-{rank}").read_text() for rank in range(2))
    assert first == second != given.value.hex() and len(first) == 64
    assert first not in done.all


def test_an_intruder_does_not_change_a_job_or_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-np", "2", "--min-np", "2", PYTHON, "-c", ADD]
    log = tmp_path / "log"
    with intruding(tmp_path / "intruder") as intrusion, log.open("w") as output:
        launcher = subprocess.Popen(
            [PYTHON, "-m", "tutti.horovod.run.command", *words],
            cwd=tmp_path,
            env=environment(PYTHONPATH=str(Path(intruder.__file__).parent)),
            stdout=output,
            stderr=output,
        )
        try:
            said = wait_until(lambda: re.search(r"driver (\S+):(\d+)\n", log.read_text()), log.read_text, launcher)
            monkeypatch.setattr(sys.modules[Membership.__module__], "_CONNECT_SECONDS", 2.0)
            with pytest.raises(HorovodInternalError, match="could not reach the elastic driver"):
                Membership(f"127.0.0.1:{intrusion.fake_ports[0]}", 0)
            intrusion.attack(processes_in(tmp_path), recorded_in(tmp_path))
            (tmp_path / "enough").touch()
            code = wait_for_end(launcher, log.read_text)
        finally:
            launcher.kill()
            launcher.wait()
    assert code == 0, log.read_text()
    assert said[1] == "127.0.0.1" and log.read_text().count("wrong 0 size 2\n") == 2


def test_a_failing_rank_ends_those_on_another_host(ssh: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    flags, env = ssh
    done = horovodrun("-np", "2", "-H", f"{OTHER_HOST}:1,localhost:1", *flags, *program(FAIL), cwd=tmp_path, **env)
    assert (done.code, "rank 1 on host localhost ended with exit code 3" in done.err) == (1, True), done.all
    done = horovodrun("-np", "2", "-H", f"localhost:1,{OTHER_HOST}:1", *flags, *program(FAIL), cwd=tmp_path, **env)
    assert (done.code, f"rank 1 on host {OTHER_HOST} ended with exit code 3" in done.err) == (1, True), done.all


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=lambda each: str(each))
def test_ranks_on_another_host_end_with_the_launcher(
    number: int, code: int, ssh: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    flags, env = ssh
    assert _ended_by(number, ["-np", "2", "-H", f"localhost:1,{OTHER_HOST}:1", *flags], env, tmp_path) == code


def test_a_host_that_ssh_cannot_reach_is_named_before_anything_starts(
    ssh: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    flags, env = ssh
    words = ["-np", "2", "-H", f"localhost:1,{OTHER_HOST}:1", *flags[2:], "touch", "started"]
    with reserved_port(OTHER_HOST) as port:
        done = horovodrun("-p", str(port), *words, cwd=tmp_path, **env)
    assert done.code == 2
    assert f"host {OTHER_HOST} cannot be used by ssh: ssh: connect to host" in done.err
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("launcher", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpirun_starts_ranks_with_and_without_horovodrun(launcher: str, tmp_path: Path) -> None:
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed here")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec {shutil.which(launcher)} "$@"\n')
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    env: dict[str, Any] = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "MY_SETTING": "kept"}
    (tmp_path / "work.py").write_text(REDUCE)
    more = ["--oversubscribe"] if "openmpi" in launcher else []
    for done in (
        horovodrun("-np", "2", "--mpi", PYTHON, "work.py", cwd=tmp_path, **env),
        command(launcher, *more, "-np", "2", PYTHON, "work.py", cwd=tmp_path, **env),
    ):
        assert done.code == 0, done.all
        assert "sum 3.0 place 0 2 0 2 0 1 kept" in done.out and "sum 3.0 place 1 2 1 2 0 1 kept" in done.out


def test_a_function_is_called_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    assert call.run(work.add_up, (2.0,), {"times": 3}, num_proc=2) == [(0, 12.0), (1, 12.0)]
    with pytest.warns(DeprecationWarning, match="np is called num_proc"):
        assert call.run(os.getcwd, np=1) == [str(tmp_path)]


def test_what_a_rank_raises_comes_back_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sentence = "Horovod detected that one or more processes exited with non-zero status"
    cause = r"rank 1 failed:\nTraceback.*KeyError: 'rank 1 has had enough'"
    with pytest.raises(RuntimeError, match=rf"(?s){sentence}.*{cause}"):
        call.run(work.fail_on_rank_1, num_proc=2)
    with pytest.raises(RuntimeError, match=rf"(?s)the elastic job ended with exit code 1. {sentence}.*{cause}"):
        call.run(work.fail_on_rank_1, num_proc=2, min_num_proc=2)
    with pytest.raises(RuntimeError, match="rank 1 on host localhost was ended by signal SIGKILL"):
        call.run(work.die_on_rank_1, num_proc=2)
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 failed:.*cannot pickle 'generator'"):
        call.run(work.give_back_what_cannot_travel)


def test_a_pickle_is_opened_only_with_the_signature_of_the_job(tmp_path: Path) -> None:
    secret, other = make_secret(), make_secret()
    server = call.CallServer(b"call" * 3_000_000, secret)
    port = server.start(listen(0, "127.0.0.1"))
    answer = {"last": {"rank": 0, "well": True}}
    with contextlib.closing(Intruder(tmp_path)) as without_secret:
        report = without_secret.attack([port], [])
    assert (report["ours"], report["believed"]) == ([port], [])
    for part in (other.sign(b"answer", call._answer_of(0, True)), secret.sign(b"answer", call._answer_of(1, True))):
        with connect("127.0.0.1", port, secret) as connection:
            connection.send("rank")
            connection.send("answer", part=call.b64encode(part).decode(), **answer)
            assert list(connection.messages()) == []
    assert server.answers == {}
    signed = call._receive_call("127.0.0.1", port, secret)
    assert secret.verify(signed, call._CALL) == b"call" * 3_000_000
    call._send_answer("127.0.0.1", port, secret, True, b"answer" * 2_000_000)
    assert server.answers == {0: (True, b"answer" * 2_000_000)}
    server.close()


def test_functions_that_cannot_travel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to the ranks"):
        call.run(work.add_up, args=[threading.Lock()])
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match="or install cloudpickle"):
        call.run(lambda: 1)
    monkeypatch.setattr(work.add_up, "__module__", "__main__")
    with pytest.raises(ConfigError, match="Move it into one, or install cloudpickle"):
        call.run(work.add_up)


def test_functions_of_the_main_program_travel_with_cloudpickle(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import json, os\nfrom tutti.horovod.run.call import run\noffset = 5\n"
        "def place(scale):\n    return int(os.environ['HOROVOD_RANK']) * scale + offset\n"
        "print('answers', json.dumps(run(place, (2,), num_proc=3)))\n"
    )
    done = command(PYTHON, "main.py", cwd=tmp_path)
    assert done.code == 0, done.all
    assert json.loads(done.out.partition("answers")[2]) == [5, 7, 9]


def _ended_by(number: int, flags: list[str], env: dict[str, str], folder: Path) -> int:
    """The exit code of a launcher that a signal ends once its ranks are there; every test checks that none is left."""
    words = [PYTHON, "-m", "tutti.horovod.run.command", *flags, *program(WAIT)]
    launcher = subprocess.Popen(words, cwd=folder, env=environment(**env), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(folder.glob("here-*"))) == 2, lambda: "no ranks", launcher)
        launcher.send_signal(number)
        return wait_for_end(launcher, lambda: "the launcher does not end")
    finally:
        launcher.kill()
        launcher.wait()
