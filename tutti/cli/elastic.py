"""`tutti train --min-ranks --max-ranks`: training that continues when ranks are lost, and takes new ranks."""

import contextlib
import os
import platform
import shlex
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import tutti
from tutti.cli.ranks import begun_run, check, finish
from tutti.config.check import check_noise_scale
from tutti.config.load import resolve
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import CheckpointError, ConfigError, Interrupted, LaunchError
from tutti.launch import local
from tutti.launch.elastic.leader import LAST, ElasticTerms, HostServer, Leader
from tutti.launch.elastic.member import Member, Offer, connect_to_leader
from tutti.launch.elastic.slots import usable_ranks
from tutti.launch.hosts import LOOPBACK, interface_address
from tutti.ranks.environments import discover
from tutti.ranks.messages import listen
from tutti.ranks.placement import Placement
from tutti.ranks.rendezvous import find_store_port, serve_store_port
from tutti.ranks.secret import find_secret
from tutti.runs.folder import RunFolder, check_writable, create_folder, write_config
from tutti.runs.listing import read_state

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_OF_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL")  # set for this launcher, not for its ranks
_MEMBER_SECONDS = 45.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Program:
    """What the ranks of this host train, as it was given to this host."""

    recipe: str  # as it was given: a recipe, or a run folder to resume
    config: RunConfig
    overrides: list[str]
    resumed: RunFolder | None

    def offer(self, slots: int, order: int) -> Offer:
        """Return what this host offers to a job."""
        return Offer(slots, self.config.recipe, self.resume_overrides, tutti.__version__, order)

    @property
    def resume_overrides(self) -> list[str]:
        """Return the overrides of ranks; those of a new run are in the configuration in its folder."""
        return self.overrides if self.resumed else []

    def arguments(self, folder: Path) -> list[str]:
        """Return the command line of ranks in the run folder of a job, if the job trains what this host was given."""
        run = RunFolder(folder)
        if not run.config.is_file():
            raise LaunchError(
                f"the run folder {folder} cannot be seen on host {platform.node()}: "
                "expected one on a file system that all hosts share. Set out=FOLDER on the first host."
            )
        name = resolve(str(run.config), []).config.recipe
        if name != self.config.recipe or (self.resumed and not self.resumed.path.samefile(folder)):
            raise LaunchError(
                f"the job trains {name!r} in {folder}, and this host was given {self.recipe}: expected the same. "
                "Join the job with its own recipe."
            )
        return ["-m", "tutti", "train", str(folder), *self.resume_overrides]


@dataclass(frozen=True)
class ElasticRequest:
    """The options of an elastic job."""

    ranks: int | None
    min_ranks: int | None
    max_ranks: int | None
    join: str | None
    resume: str | None
    wait_seconds: float
    pause_seconds: float


def train(recipe: str, overrides: list[str], asked: ElasticRequest) -> None:
    """Run as the first launcher of an elastic job, or join a job."""
    if asked.ranks is not None:
        local.check_ranks(asked.ranks)
    placement = discover(os.environ)
    make_importable(recipe)
    folder = RunFolder(Path(recipe)) if (Path(recipe) / "config.yaml").is_file() else None
    config = resolve(str(folder.config) if folder else recipe, overrides).config
    program = Program(recipe, config, overrides, folder)
    for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
        del os.environ[name]
    if asked.join is not None:
        if overrides and not folder:
            raise LaunchError(
                f"{overrides[0]} with --join: a job that is joined keeps its own configuration. Leave it out."
            )
        _join(*_where(asked.join), asked.ranks or asked.max_ranks or 1, program, LAST)
        return
    terms = _terms(config, asked, placement)
    places = asked.ranks or -(-terms.max_ranks // placement.world_size)
    if placement.rank > 0:
        assert placement.address and placement.port
        seconds = config.runtime.start_timeout_seconds
        key = placement.key
        port = find_store_port(key, placement.address, placement.rank, seconds) if key else placement.port
        _join(placement.address, port, places, program, placement.rank)
        return
    check(config, usable_ranks(terms.max_ranks, terms.max_ranks, terms.parts), places)
    if folder:
        begun_run(folder.path, asked.resume)
        if read_state(folder) == "finished":
            print(f"the run in {folder.path} is finished: nothing is left to do")
            return
    else:
        check_writable(config.out)
        folder = create_folder(config.out, config.recipe, terms.max_ranks)
        write_config(folder, config.as_yaml())
    _lead(program, terms, places, folder, placement)


def _terms(config: RunConfig, asked: ElasticRequest, placement: Placement) -> ElasticTerms:
    """Check the options of an elastic job against its configuration."""
    least, most, batch = asked.min_ranks, asked.max_ranks, config.batch
    if least is None or most is None or not 1 <= least <= most:
        given = " ".join(f"{name} {value}" for name, value in (("--min-ranks", least), ("--max-ranks", most)) if value)
        raise LaunchError(f"{given}: expected both, of 1 or more, in this order. Try --min-ranks 2 --max-ranks 4.")
    if asked.resume is not None:
        raise CheckpointError(
            f"--resume {asked.resume} with --min-ranks: an elastic job resumes from the newest checkpoint of a run. "
            "Give its run folder in place of the recipe."
        )
    if batch.global_batch is None:
        raise ConfigError(
            f"batch.per_rank={batch.per_rank} with --min-ranks: the global batch would change with the number of "
            f"ranks. Set batch.global={(batch.per_rank or 1) * most}, and batch.micro={batch.per_rank} to keep its "
            "parts."
        )
    if placement.local_size > 1:
        raise LaunchError(
            f"{placement.launcher} has started {placement.local_size} launchers on host {platform.node()}: expected "
            "one on each host. Start one task per node, and give its ranks with -n."
        )
    parts = batch.global_batch // (batch.micro or 1)
    usable = [count for count in range(1, most + 1) if parts % count == 0]
    if usable[-1] < least:
        of_micro = f" of micro-batches of {batch.micro}" if batch.micro else ""
        raise ConfigError(
            f"batch.global={batch.global_batch}{of_micro} does not split over any of {least} to {most} ranks; it does "
            f"over {', '.join(map(str, usable))}. Change --min-ranks or batch.global."
        )
    check_noise_scale(config, min(count for count in usable if count >= least))
    return ElasticTerms(least, most, parts, asked.wait_seconds, asked.pause_seconds, first_hosts=placement.world_size)


def _lead(program: Program, terms: ElasticTerms, places: int, folder: RunFolder, placement: Placement) -> None:
    """Run as the first launcher, which also starts ranks on this host."""
    config, secret, address = program.config, find_secret(), _listening_address(placement)
    listener = listen(0 if placement.key or placement.port is None else placement.port, address)
    port = listener.getsockname()[1]
    if placement.key:
        serve_store_port(placement.key, port, placement.world_size - 1, config.runtime.start_timeout_seconds)
    server = HostServer(config.recipe, program.resume_overrides, tutti.__version__, secret)
    lead = Leader(terms, folder, server, lambda text: print(text, flush=True), address)
    for number in _SIGNALS:
        signal.signal(number, lead.stop)
    server.start(listener)
    where = f"{address or socket.gethostname()}:{port}"
    given = shlex.join([program.recipe, *program.resume_overrides])
    print(f"more ranks can join: tutti train {given} --join {where} -n 1", flush=True)
    member = _member(address or LOOPBACK, port, program)
    thread = threading.Thread(target=member.run, args=(program.offer(places, 0),), daemon=True)
    thread.start()
    failure = lead.run()
    thread.join(_MEMBER_SECONDS)
    server.close()
    finish(folder, failure)


def _listening_address(placement: Placement) -> str:
    """Return the address at which hosts can join: the interface's where one is given, otherwise all.

    Hosts that were started together reach this one by the name that their launcher gives, on any interface.
    """
    interface = os.environ.get(_INTERFACE, "").split(",")[0]
    if interface and placement.world_size == 1:
        with contextlib.suppress(LaunchError):  # it has no address of IPv4; the ranks report one that does not exist
            return interface_address(interface, f"{_INTERFACE}=")
    return ""


def _join(address: str, port: int, places: int, program: Program, order: int) -> None:
    """Offer ranks to a job until it ends, or until a signal ends this launcher."""
    check(program.config, 1, places)
    member = _member(address, port, program)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: member.leave())
    code, text = member.run(program.offer(places, order))
    if code:
        print(text if code == Interrupted.exit_code else f"error: {text}", file=sys.stderr)
    sys.exit(code)


def _member(address: str, port: int, program: Program) -> Member:
    secret = find_secret()
    connection = connect_to_leader(address, port, secret)
    return Member(connection, address, secret, program.arguments, program.config.runtime.threads)


def _where(join: str) -> tuple[str, int]:
    address, _, port = join.rpartition(":")
    if not address or not port.isdigit():
        raise LaunchError(f"--join {join}: expected HOST:PORT, as the first launcher of the job has printed it.")
    return address.strip("[]"), int(port)
