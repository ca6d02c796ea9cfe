"""The command line of `horovodrun`, with the flags of Horovod, and the options of a job that it specifies."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tutti.errors import ConfigError, LaunchError
from tutti.horovod import __version__
from tutti.horovod.settings import add_settings, read_settings_file, settings_environment, without_meaning
from tutti.launch.hosts import Host, Slot, assign_slots, parse_hosts, read_hostfile
from tutti.ranks.secret import Secret, make_secret


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How ranks are started, and where their output is written."""

    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: tuple[str, ...] = ()
    output_filename: str | None = None
    prefix_timestamp: bool = False
    verbose: bool = False
    environment: dict[str, str] = field(default_factory=dict, repr=False)  # of every rank, with what flags set
    secret: Secret = field(default_factory=make_secret)  # of this job


@dataclass(frozen=True, kw_only=True)
class StaticOptions(StartOptions):
    """The options of a job with a fixed number of ranks."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(StartOptions):
    """The options of an elastic job."""

    np: int  # ranks to start with
    min_np: int  # with fewer slots, the job waits
    max_np: int | None = None  # None: the number of slots
    host_discovery_script: str | None = None  # None: always the hosts below
    slots_per_host: int | None = None  # for hosts that the script prints without slots
    elastic_timeout: float = 600.0  # seconds to wait for min_np slots
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None  # seconds; None: a host that failed is never used again
    start_timeout: float | None = None  # seconds
    hosts: tuple[Host, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. See: {self.prog} --help")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; a flag has precedence over the settings of the YAML file."""
    given = _parser().parse_args(words)
    if given.command[:1] == ["--"]:
        given.command = given.command[1:]
    if given.config_file is not None:
        for name, value in read_settings_file(given.config_file).items():
            if getattr(given, name) in (None, False):
                setattr(given, name, value)
    return given


def is_elastic(given: argparse.Namespace) -> bool:
    """Return whether the flags specify an elastic job."""
    return given.host_discovery_script is not None or given.min_np is not None


def static_options(given: argparse.Namespace) -> StaticOptions:
    """Return the options of a job with a fixed number of ranks."""
    hosts = _hosts(given)
    count = given.np
    if count is None and hosts:
        count = sum(host.slots for host in hosts)
    if count is None:
        raise LaunchError("no -np: expected the number of processes. Try: horovodrun -np 2 python train.py")
    _check_count("-np", count)
    return StaticOptions(
        slots=tuple(assign_slots(hosts or [Host("localhost", count)], count)),
        **_start_options(given),
    )


def _start_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options that both kinds of jobs have."""
    return {
        "ssh_port": given.ssh_port,
        "ssh_identity_file": given.ssh_identity_file,
        "network_interfaces": _interfaces(given),
        "output_filename": given.output_filename,
        "prefix_timestamp": given.prefix_timestamp,
        "verbose": given.verbose,
        "environment": _environment(given),
    }


def elastic_options(given: argparse.Namespace) -> ElasticOptions:
    """Return the options of an elastic job."""
    count = given.np if given.np is not None else given.min_np
    if count is None:
        raise LaunchError("no -np and no --min-np: expected the number of processes to start with. Try: -np 2")
    least = given.min_np if given.min_np is not None else count
    _check_count("-np", count)
    _check_count("--min-np", least)
    if count < least or (given.max_np is not None and given.max_np < count):
        raise LaunchError(
            f"-np {count} --min-np {least} --max-np {given.max_np}: expected min-np <= np <= max-np. Change one."
        )
    hosts = _hosts(given)
    if given.host_discovery_script is None and not hosts:
        hosts = [Host("localhost", given.max_np or count)]
    if given.slots_per_host is not None:
        _check_count("--slots-per-host", given.slots_per_host)
    script = given.host_discovery_script
    if script is not None and not os.access(script, os.X_OK):
        raise LaunchError(
            f"--host-discovery-script {script} is not an executable program: expected one that prints host:slots "
            "lines. Give its path, and make it executable: chmod +x"
        )
    cooldown = given.blacklist_cooldown_range
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        raise LaunchError(f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: expected 0 < MIN <= MAX seconds.")
    return ElasticOptions(
        np=count,
        min_np=least,
        max_np=given.max_np,
        host_discovery_script=script,
        slots_per_host=given.slots_per_host,
        elastic_timeout=given.elastic_timeout if given.elastic_timeout is not None else 600.0,
        reset_limit=given.reset_limit,
        cooldown_range=tuple(cooldown) if cooldown else None,
        start_timeout=given.start_timeout,
        **_start_options(given),
        hosts=tuple(hosts),
    )


def flags_without_meaning(given: argparse.Namespace) -> list[str]:
    """Return the given flags that have no effect here."""
    found = without_meaning(vars(given))
    if given.disable_cache:
        found.append("--disable-cache")
    if given.jsrun:
        found.append("--jsrun")
    if not given.mpi:
        for_mpi = {"--tcp": given.tcp, "--mpi-args": given.mpi_args, "--binding-args": given.binding_args}
        found += [flag for flag, value in for_mpi.items() if value]
    return found


def _hosts(given: argparse.Namespace) -> list[Host]:
    if given.hosts is not None and given.hostfile is not None:
        raise LaunchError(f"-H {given.hosts} and --hostfile {given.hostfile}: expected one of them. Leave one out.")
    if given.hosts is not None:
        return parse_hosts(given.hosts)
    return read_hostfile(given.hostfile) if given.hostfile is not None else []


def _interfaces(given: argparse.Namespace) -> tuple[str, ...]:
    text = given.network_interfaces or given.network_interface
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _environment(given: argparse.Namespace) -> dict[str, str]:
    environment = dict(os.environ) | settings_environment(vars(given))
    if given.start_timeout is not None:
        if given.start_timeout <= 0:
            raise ConfigError(f"--start-timeout {given.start_timeout:g}: expected more than 0 seconds.")
        environment["HOROVOD_START_TIMEOUT"] = f"{given.start_timeout:g}"
    return environment


def _check_count(flag: str, count: int) -> None:
    if count < 1:
        raise LaunchError(f"{flag} {count}: expected 1 or more. Try {flag} 2.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="horovodrun",
        description="Start a program on several ranks, here and on other hosts, with Horovod's flags.",
        epilog="Examples: horovodrun -np 4 python train.py    horovodrun -np 8 -H h1:4,h2:4 python train.py",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__, help="print the version")
    add("-np", "--num-proc", dest="np", type=int, help="ranks to start")
    add("-cb", "--check-build", action="store_true", help="print what is available here, and exit")
    add("--disable-cache", action="store_true", help="accepted without effect; hosts are always checked")
    add("--start-timeout", type=float, help="seconds to wait for all ranks (HOROVOD_START_TIMEOUT)")
    add("--output-filename", metavar="DIR", help="also write the output of ranks to DIR/rank.N/stdout and stderr")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_timestamp",
        action="store_true",
        help="print the time before every line",
    )
    add("--verbose", action="store_true", help="print what is started, and which flags have no effect here")
    add("--config-file", metavar="YAML", help="settings of the ranks; flags have precedence")
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    hosts = parser.add_argument_group("hosts").add_argument
    hosts("-H", "--hosts", help="h1:2,h2:2; default: this machine")
    hosts("-hostfile", "--hostfile", help="a file with lines such as 'h1 slots=2'")
    hosts("-p", "--ssh-port", type=int, help="the port of ssh on all hosts")
    hosts("-i", "--ssh-identity-file", help="the private key for ssh")
    hosts("--network-interfaces", help="the interfaces to use, separated by commas")
    hosts("--network-interface", help="the same, deprecated")
    starter = parser.add_argument_group("how ranks are started")
    choice = starter.add_mutually_exclusive_group()
    choice.add_argument("--gloo", action="store_true", help="by this program, over ssh to other hosts (the default)")
    choice.add_argument("--mpi", action="store_true", help="by mpirun (Open MPI or MPICH)")
    choice.add_argument("--jsrun", action="store_true", help="accepted without effect")
    starter.add_argument("--mpi-args", help="more arguments for mpirun")
    starter.add_argument("--binding-args", help="how mpirun binds ranks to cores")
    starter.add_argument("--tcp", action="store_true", help="make mpirun use TCP only")
    elastic = parser.add_argument_group("elastic jobs").add_argument
    elastic("--min-np", "--min-num-proc", dest="min_np", type=int, help="with fewer slots, the job waits")
    elastic("--max-np", "--max-num-proc", dest="max_np", type=int, help="the largest number of ranks")
    elastic("--host-discovery-script", help="a program that prints host:slots lines")
    elastic(
        "--slots-per-host",
        "--slots",
        dest="slots_per_host",
        type=int,
        help="slots of a host for which the script prints none",
    )
    elastic("--elastic-timeout", type=float, help="seconds to wait for min-np slots (600)")
    elastic("--reset-limit", type=int, help="how often the job may be restarted with other ranks")
    elastic(
        "--blacklist-cooldown-range",
        nargs=2,
        type=float,
        metavar=("MIN", "MAX"),
        help="seconds for which a failed host is not used",
    )
    add_settings(parser)
    return parser
