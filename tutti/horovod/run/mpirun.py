"""A job started by mpirun: the same flags in the words of Open MPI or MPICH."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from tutti.errors import LaunchError
from tutti.horovod.run.arguments import StaticOptions
from tutti.horovod.run.static_job import interface_environment, without_launchers
from tutti.launch.hosts import free_port, is_local, is_portable, own_address


def mpirun_command(
    options: StaticOptions, command: Sequence[str], mpi_args: str = "", binding_args: str = "", tcp: bool = False
) -> tuple[list[str], dict[str, str]]:
    """The words of mpirun, and the environment to start it in."""
    hosts = [slot.host for slot in options.slots]
    base = without_launchers(options.environment)
    others = [host for host in hosts if not is_local(host)]
    interface = options.network_interfaces[0] if options.network_interfaces else None
    address = own_address(interface, others[0] if others else None) if is_local(hosts[0]) else hosts[0]
    told = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "mpi",
    }
    environment = base | told | interface_environment(options.network_interfaces)
    words = _open_mpi if _kind(base) == "Open MPI" else _mpich
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    started = words(options, counts, environment, shlex.split(binding_args), tcp)
    return [*started, *shlex.split(mpi_args), *command], environment


def _kind(environment: Mapping[str, str]) -> str:
    """Which MPI there is, by what its mpirun says of itself."""
    if shutil.which("mpirun", path=environment.get("PATH")) is None:
        raise LaunchError(
            "--mpi, but there is no mpirun on PATH: expected Open MPI or MPICH. Install one (Debian: apt-get install "
            "openmpi-bin; on a cluster: module load openmpi), or leave out --mpi."
        )
    asked = subprocess.run(["mpirun", "--version"], env=dict(environment), capture_output=True, text=True, check=False)
    said = asked.stdout + asked.stderr
    if re.search(r"Open MPI|OpenRTE|Spectrum MPI", said):
        return "Open MPI"
    if re.search(r"HYDRA|MPICH|Intel\(R\) MPI|MVAPICH", said, re.IGNORECASE):
        return "MPICH"
    raise LaunchError(
        f"--mpi, but mpirun --version says {said.strip()[:80]!r}: expected Open MPI or MPICH. "
        "Put one of them first on PATH, or leave out --mpi."
    )


def _open_mpi(
    options: StaticOptions, counts: Mapping[str, int], environment: dict[str, str], binding: list[str], tcp: bool
) -> list[str]:
    words = ["mpirun", "--allow-run-as-root", "--tag-output", "-np", str(len(options.slots))]
    words += ["-H", ",".join(f"{host}:{count}" for host, count in counts.items())]
    words += binding or ["--bind-to", "none", "--map-by", "slot"]
    if tcp:
        words += ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]
    if _ssh_words(options):
        words += ["--mca", "plm_rsh_args", shlex.join(_ssh_words(options))]
    if options.network_interfaces:
        words += ["--mca", "btl_tcp_if_include", ",".join(options.network_interfaces)]
    if options.output_filename:
        words += ["--output-filename", options.output_filename]
    if options.prefix_timestamp:
        words += ["--timestamp-output"]
    if not all(map(is_local, counts)):  # on this host all variables are inherited
        words += [word for name in sorted(filter(is_portable, environment)) for word in ("-x", name)]
    return words


def _mpich(
    options: StaticOptions, counts: Mapping[str, int], environment: dict[str, str], binding: list[str], tcp: bool
) -> list[str]:
    """Hydra passes on the whole environment by itself."""
    words = ["mpirun", "-prepend-rank", "-n", str(len(options.slots))]
    words += ["-hosts", ",".join(f"{host}:{count}" for host, count in counts.items()), *binding]
    if _ssh_words(options):
        environment["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(_ssh_words(options))
    if options.network_interfaces:
        words += ["-iface", options.network_interfaces[0]]
    if options.output_filename:
        words += ["-outfile-pattern", f"{options.output_filename}/rank.%r.stdout"]
        words += ["-errfile-pattern", f"{options.output_filename}/rank.%r.stderr"]
    return words


def _ssh_words(options: StaticOptions) -> list[str]:
    port = ["-p", str(options.ssh_port)] if options.ssh_port else []
    return port + (["-i", options.ssh_identity_file] if options.ssh_identity_file else [])
