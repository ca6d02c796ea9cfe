"""The flags of horovodrun: hosts, settings, mpirun's words, and what is refused before anything starts."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished, command
from prepared import PYTHON

from tutti.errors import ConfigError, LaunchError
from tutti.horovod.run import arguments
from tutti.horovod.run.command import mpirun_command
from tutti.horovod.run.static_job import rank_environment
from tutti.launch.hosts import Host, assign_slots, is_local, parse_hosts, read_hostfile
from tutti.ranks.secret import SECRET_VARIABLE

PROGRAM = ["python", "train.py", "--lr", "0.1", "-np", "9"]


def horovodrun(*words: str, cwd: Path, **env: Any) -> Finished:
    return command(PYTHON, "-m", "tutti.horovod.run.command", *words, cwd=cwd, **env)


def test_hosts_are_read_from_both_forms(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# a comment\nh1 slots=2\n\nh2  slots=3 # more\nh3\n")
    assert parse_hosts("h1:2,h2:3,h3") == [Host("h1", 2), Host("h2", 3), Host("h3", 1)]
    assert read_hostfile(str(tmp_path / "hosts")) == parse_hosts("h1:2,h2:3,h3")
    assert parse_hosts("a:1,a:2") == [Host("a", 3)]


def test_ranks_fill_hosts_in_order_and_know_their_place_across() -> None:
    slots = assign_slots(parse_hosts("h1:1,h2:3,h3:2"), 5)
    assert [slot.host for slot in slots] == ["h1", "h2", "h2", "h2", "h3"]
    assert [slot.local_rank for slot in slots] == [0, 0, 1, 2, 0]
    assert [slot.local_size for slot in slots] == [1, 3, 3, 3, 1]
    assert [(slot.cross_rank, slot.cross_size) for slot in slots] == [(0, 3), (1, 3), (0, 1), (0, 1), (2, 3)]
    assert [slot.node_rank for slot in slots] == [0, 1, 1, 1, 2]


def test_this_machine_is_known_by_its_names() -> None:
    assert is_local("localhost") and is_local("127.0.0.1") and is_local(os.uname().nodename)
    assert not is_local("127.0.0.2") and not is_local("no-such-host.invalid")


def test_a_rank_is_told_its_place_in_horovods_and_torchs_words() -> None:
    told = rank_environment(assign_slots([Host("h1", 2), Host("h2", 1)], 3)[2], "h1", 4321, ("eth0", "eth1"))
    assert (told["HOROVOD_RANK"], told["HOROVOD_SIZE"], told["HOROVOD_LOCAL_RANK"]) == ("2", "3", "0")
    assert (told["HOROVOD_CROSS_RANK"], told["HOROVOD_CROSS_SIZE"], told["HOROVOD_HOSTNAME"]) == ("1", "2", "h2")
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"], told["MASTER_PORT"]) == ("2", "3", "h1", "4321")
    assert (told["HOROVOD_GLOO_IFACE"], told["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0,eth1")
    assert told["PYTHONUNBUFFERED"] == "1"


def test_the_command_keeps_its_own_flags() -> None:
    given = arguments.parse(["-np", "2", *PROGRAM])
    assert given.np == 2
    assert given.command == PROGRAM
    assert arguments.parse(["-np", "2", "--", *PROGRAM]).command == PROGRAM


def test_settings_become_variables() -> None:
    flags = "--fusion-threshold-mb 3 --cycle-time-ms 2.5 --no-stall-check --timeline-filename t.json --log-level DEBUG "
    flags += "--no-autotune --hierarchical-allreduce --log-without-timestamp --start-timeout 7"
    environment = arguments.static_options(arguments.parse(["-np", "1", *flags.split(), *PROGRAM])).environment
    assert environment["HOROVOD_FUSION_THRESHOLD"] == str(3 * 1024 * 1024)
    assert environment["HOROVOD_CYCLE_TIME"] == "2.5"
    assert environment["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert environment["HOROVOD_TIMELINE"] == "t.json"
    assert environment["HOROVOD_LOG_LEVEL"] == "DEBUG"
    assert environment["HOROVOD_AUTOTUNE"] == "0"
    assert environment["HOROVOD_HIERARCHICAL_ALLREDUCE"] == "1"
    assert environment["HOROVOD_LOG_HIDE_TIME"] == "1"
    assert environment["HOROVOD_START_TIMEOUT"] == "7"
    assert "HOROVOD_CACHE_CAPACITY" not in environment


def test_flags_go_before_the_settings_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "verbose: true\nparams:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 3\n"
        "stall_check:\n  enabled: false\nlogging:\n  hide_timestamp: true\n"
    )
    given = arguments.parse(["-np", "1", "--config-file", str(path), "--cycle-time-ms", "9", *PROGRAM])
    environment = arguments.static_options(given).environment
    assert given.verbose
    assert environment["HOROVOD_FUSION_THRESHOLD"] == str(32 << 20)
    assert environment["HOROVOD_CYCLE_TIME"] == "9.0"
    assert environment["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert environment["HOROVOD_LOG_HIDE_TIME"] == "1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("params:\n  fusion_treshold_mb: 3\n", "params.fusion_treshold_mb is not a setting. Did you mean"),
        ("params:\n  cycle_time_ms: fast\n", "params.cycle_time_ms: 'fast'. Expected a value of type float"),
        ("logging:\n  level: LOUD\n", "logging.level: 'LOUD'. Expected one of TRACE"),
        ("- 1\n", "expected sections"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_settings_file_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(content)
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        arguments.parse(["-np", "1", "--config-file", str(tmp_path / "settings.yaml"), *PROGRAM])


def test_rare_flags_are_accepted_and_named_as_idle() -> None:
    flags = (
        "--disable-cache --torus-allreduce --num-nccl-streams 2 --thread-affinity 0,1 --gloo-timeout-seconds 5 --jsrun "
    )
    flags += "--mpi-threads-disable --tcp --binding-args=-x --no-hierarchical-allgather --autotune-log-file f"
    idle = arguments.flags_without_meaning(arguments.parse(["-np", "2", *flags.split(), *PROGRAM]))
    assert "--jsrun" in idle and "--tcp" in idle and "--num-nccl-streams" in idle and "--autotune-log-file" in idle


def test_elastic_flags_reach_the_driver(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    flags = f"-np 2 --min-np 1 --max-np 4 --host-discovery-script {script} --slots-per-host 3 --elastic-timeout 60 "
    flags += "--reset-limit 5 --blacklist-cooldown-range 1 8 -p 2222 -i key --output-filename out --start-timeout 9"
    given = arguments.parse([*flags.split(), *PROGRAM])
    assert arguments.is_elastic(given)
    options = arguments.elastic_options(given)
    assert (options.np, options.min_np, options.max_np, options.slots_per_host) == (2, 1, 4, 3)
    assert (options.elastic_timeout, options.reset_limit, options.cooldown_range) == (60.0, 5, (1.0, 8.0))
    assert (options.ssh_port, options.ssh_identity_file, options.output_filename) == (2222, "key", "out")
    assert options.environment["HOROVOD_START_TIMEOUT"] == "9"
    fixed = arguments.elastic_options(arguments.parse(["--min-np", "2", "-H", "a:4", *PROGRAM]))
    assert (fixed.np, fixed.min_np, fixed.hosts, fixed.host_discovery_script) == (2, 2, (Host("a", 4),), None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-np 0", "-np 0: expected 1 or more. Try -np 2."),
        ("-np -3", "-np -3: expected 1 or more"),
        ("-np two", "invalid int value: 'two'"),
        ("", "no -np: expected the number of processes"),
        ("-np 3 -H localhost:2", "-np 3, but localhost:2 has 2 slots. Ask for 2 processes at most"),
        ("-np 2 -H localhost:two", "'localhost:two' is no host. Expected host:slots"),
        ("-np 2 -H localhost:2,,", "'' is no host"),
        ("-np 2 -H localhost:0", "localhost has 0 slots. Expected 1 or more"),
        ("-np 2 -hostfile nowhere", "--hostfile nowhere cannot be read: No such file"),
        ("-np 2 -hostfile bad", "--hostfile bad, line 2: 'h1 slots=many'. Expected"),
        ("-np 2 -hostfile empty", "it names no host"),
        ("-np 2 -H a:1 --hostfile bad", "expected one of them"),
        ("-np 2 --cycle-time-ms -1", "--cycle-time-ms -1.0: expected 0 or more"),
        ("-np 2 --start-timeout 0", "--start-timeout 0: expected more than 0 seconds"),
        ("-np 2 --gloo --mpi", "not allowed with argument"),
        ("-np 2 --nonsense", "unrecognized arguments: --nonsense"),
        ("-np 2 --min-np 3", "expected min-np <= np <= max-np"),
        ("-np 2 --host-discovery-script nowhere", "is not an executable program"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 5 1", "expected 0 < MIN <= MAX"),
        ("-np 2 --mpi --min-np 1", "Leave out --mpi"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tutti.horovod.run.command import run_commandline

    monkeypatch.chdir(tmp_path)
    Path("bad").write_text("h0 slots=1\nh1 slots=many\n")
    Path("empty").write_text("# nobody\n")
    program = [] if "--nonsense" in words else ["touch", "started"]
    with pytest.raises(SystemExit) as end:
        run_commandline([*words.split(), *program])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("horovodrun: error: ")
    assert said in error
    assert not Path("started").exists()


@pytest.mark.system
def test_no_command_is_a_mistake(tmp_path: Path) -> None:
    done = horovodrun("-np", "2", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "no command: expected a program for the ranks" in done.err


@pytest.mark.system
def test_a_login_node_needs_no_torch(tmp_path: Path) -> None:
    modules = ", ".join(f"tutti.horovod.run.{name}" for name in ("command", "static_job", "call"))
    probe = f"import sys, {modules}; assert 'torch' not in sys.modules"
    assert command(sys.executable, "-c", probe, cwd=tmp_path).code == 0


@pytest.mark.system
def test_open_mpi_and_mpich_are_told_in_their_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SETTING", "1")
    monkeypatch.setenv("HOSTNAME", "here")
    for kind, said in (("open", "mpirun (Open MPI) 4.1.4"), ("mpich", "HYDRA build details:")):
        program = tmp_path / kind / "mpirun"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
    given = arguments.parse(
        ["-np", "3", "-H", "localhost:2,no-such.invalid:1", "-p", "2222", "--network-interfaces", "lo", *PROGRAM]
    )
    for kind in ("open", "mpich"):
        monkeypatch.setenv("PATH", f"{tmp_path / kind}:/usr/bin:/bin")
        options = arguments.static_options(given)
        words, environment = mpirun_command(options, PROGRAM, 20_001, "--more 'a b'", "--bound", True)
        assert environment[SECRET_VARIABLE] == options.secret.value.hex()
        assert options.secret.value.hex() not in " ".join(words) + repr(options)
        assert words[-len(PROGRAM) :] == PROGRAM
        assert words[-len(PROGRAM) - 2 : -len(PROGRAM)] == ["--more", "a b"]
        assert "--bound" in words
        assert "localhost:2,no-such.invalid:1" in words
        assert (environment["MASTER_ADDR"], environment["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
        if kind == "open":
            assert words[words.index("-np") + 1] == "3"
            assert words[words.index("plm_rsh_args") + 1] == "-p 2222"
            exported = [words[place + 1] for place, word in enumerate(words) if word == "-x"]
            assert {"MY_SETTING", "MASTER_PORT", "PATH", SECRET_VARIABLE} <= set(exported)
            assert "HOSTNAME" not in exported
        else:
            assert words[words.index("-n") + 1] == "3"
            assert environment["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222"


@pytest.mark.system
def test_mpi_without_mpirun_names_the_fix(tmp_path: Path) -> None:
    done = horovodrun("-np", "2", "--mpi", "true", cwd=tmp_path, PATH=str(tmp_path))
    assert done.code == 2
    assert "there is no mpirun on PATH" in done.err and "openmpi-bin" in done.err


@pytest.mark.system
def test_a_strange_mpirun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho some other program\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LaunchError, match="says 'some other program': expected Open MPI or MPICH"):
        mpirun_command(arguments.static_options(arguments.parse(["-np", "2", *PROGRAM])), PROGRAM, 20_001)


@pytest.mark.system
def test_check_build_and_version_say_what_is_here(tmp_path: Path) -> None:
    table = horovodrun("-cb", cwd=tmp_path).out
    assert "[X] PyTorch" in table and "[X] Gloo" in table and "[ ] MPI" in table and "[ ] MXNet" in table
    assert "0.28.1+tutti" in table
    assert horovodrun("-v", cwd=tmp_path).out.strip() == "0.28.1+tutti"
