"""The command `horovodrun`: start ranks on this host and others, by ssh or by mpirun."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from tutti.errors import LaunchError, TuttiError
from tutti.horovod import __version__
from tutti.horovod.run import arguments
from tutti.horovod.run.arguments import StaticOptions
from tutti.horovod.run.static_job import interface_environment
from tutti.launch.hosts import is_local, is_portable, own_address, reserve_port, without_launchers


def mpirun_command(
    options: StaticOptions,
    command: Sequence[str],
    port: int,
    mpi_args: str = "",
    binding_args: str = "",
    tcp: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of mpirun, and the environment to start it in; rank 0 holds the store at a port."""
    hosts = [slot.host for slot in options.slots]
    base = without_launchers(options.environment) | options.secret.environment()
    others = [host for host in hosts if not is_local(host)]
    interface = options.network_interfaces[0] if options.network_interfaces else None
    address = own_address(interface, others[0] if others else None) if is_local(hosts[0]) else hosts[0]
    told = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "mpi",
    }
    environment = base | told | interface_environment(options.network_interfaces)
    words = _open_mpi if _kind(base) == "Open MPI" else _mpich
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    started = words(options, counts, environment, shlex.split(binding_args), tcp)
    return [*started, *shlex.split(mpi_args), *command], environment


def _kind(environment: Mapping[str, str]) -> str:
    """Return which MPI is installed, by the version text of its mpirun."""
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
    """Return the command line for MPICH, whose launcher Hydra passes on the whole environment."""
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


def run_commandline(words: Sequence[str] | None = None) -> None:
    """Run the console script; a user error is one message and exit code 2."""
    try:
        code = run(sys.argv[1:] if words is None else words)
    except TuttiError as error:
        print(f"horovodrun: error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run what the command line specifies, and return the exit code."""
    given = arguments.parse(words)
    if given.check_build:
        print(check_build())
        return 0
    if not given.command:
        raise LaunchError("no command: expected a program for the ranks. Try: horovodrun -np 2 python train.py")
    if given.verbose and (idle := arguments.flags_without_meaning(given)):
        print(f"horovodrun: ignored, since they have no effect here: {', '.join(idle)}", file=sys.stderr)
    if arguments.is_elastic(given):
        return _run_elastic(given)
    options = arguments.static_options(given)
    if given.mpi:
        mpi = (given.mpi_args or "", given.binding_args or "", given.tcp)
        reserved = reserve_port()  # of this host; where rank 0 is on another, a port that is seldom in use
        reserved.set_inheritable(True)  # mpirun keeps it
        started, environment = mpirun_command(options, given.command, reserved.getsockname()[1], *mpi)
        if given.verbose:
            print(shlex.join(started), file=sys.stderr)
        sys.stdout.flush()
        os.execvpe(started[0], started, environment)
    from tutti.horovod.run.static_job import run_static

    return run_static(options, given.command)


def _run_elastic(given: Namespace) -> int:
    if given.mpi:
        raise LaunchError("--mpi with elastic flags: mpirun cannot change the number of ranks. Leave out --mpi.")
    options = arguments.elastic_options(given)
    from tutti.horovod.run.driver import run_elastic

    return run_elastic(options, given.command)


# Each framework with the module that its scripts import, and the framework's own.
_FRAMEWORKS = {
    "TensorFlow": ("tutti.horovod.tensorflow", "tensorflow"),
    "PyTorch": ("tutti.horovod.torch", "torch"),
    "MXNet": ("tutti.horovod.mxnet", "mxnet"),
}


def check_build() -> str:
    """Return the table of `--check-build`."""
    gloo, nccl = _torch_backends()
    groups = {
        "Available Frameworks": {name: all(map(_is_here, modules)) for name, modules in _FRAMEWORKS.items()},
        "Available Controllers": {"MPI": False, "Gloo": gloo},
        "Available Tensor Operations": {"NCCL": nccl, "DDL": False, "CCL": False, "MPI": False, "Gloo": gloo},
    }
    lines = [f"Horovod v{__version__}:"]
    for title, rows in groups.items():
        lines += ["", f"{title}:", *(f"    [{'X' if here else ' '}] {name}" for name, here in rows.items())]
    return "\n".join(lines)


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _torch_backends() -> tuple[bool, bool]:
    """Return whether torch has Gloo, and whether it has NCCL with a GPU."""
    if not _is_here("torch"):
        return False, False
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return False, False
    return dist.is_gloo_available(), torch.cuda.is_available() and dist.is_nccl_available()


if __name__ == "__main__":
    run_commandline()
