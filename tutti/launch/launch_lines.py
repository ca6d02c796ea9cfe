"""The line of a job script that starts the ranks, by launcher."""

from collections.abc import Callable, Iterable

from tutti.launch.resources import Resources
from tutti.launch.site import Site

# A rank that ends must not take the others with it: what they do and say then decides what follows. Those that have
# not ended by themselves after this time are ended.
_GRACE_SECONDS = 60


def launch_line(site: Site, resources: Resources, variables: Iterable[str]) -> str:
    """What stands before the command of a rank, which needs these variables."""
    return " ".join(LAUNCHERS[site.launcher](site, resources, variables))


def _srun(site: Site, resources: Resources, _: Iterable[str]) -> list[str]:
    """Slurm's own; since 22.05 a step does not take over the cores of a task from the job."""
    words = ["srun", f"--nodes={resources.nodes}", f"--ntasks={resources.ranks}"]
    if resources.equal:
        words += [f"--ntasks-per-node={resources.ranks_per_node}"]
    if resources.cores_per_rank:
        words += [f"--cpus-per-task={resources.cores_per_rank * site.threads_per_core}"]
    if site.binding:
        words += [f"--cpu-bind={site.binding}"]
    if resources.gpus_per_node:
        words += [f"--gpus-per-node={resources.gpus_per_node}", "--gpu-bind=none"]  # a rank sees all and takes its own
    return [*words, "--kill-on-bad-exit=0", f"--wait={_GRACE_SECONDS}"]


def _mpich(site: Site, resources: Resources, _: Iterable[str]) -> list[str]:
    """MPICH's Hydra and Intel MPI, which read the nodes of a PBS job from its file."""
    words = ["mpiexec", "-f", '"$PBS_NODEFILE"', "-n", str(resources.ranks), "-ppn", str(resources.ranks_per_node)]
    return words + _bound(site, "-bind-to", f"core:{resources.cores_per_rank or 1}")


def _pals(site: Site, resources: Resources, _: Iterable[str]) -> list[str]:
    """Cray's PALS: `depth` gives each rank that many cores side by side."""
    words = ["mpiexec", "-n", str(resources.ranks), "-ppn", str(resources.ranks_per_node)]
    words += ["--depth", str(resources.cores_per_rank)] if resources.cores_per_rank else []
    return words + _bound(site, "--cpu-bind", "depth")


def _open_mpi(site: Site, resources: Resources, variables: Iterable[str]) -> list[str]:
    """Open MPI's mpirun, which knows the nodes of the allocation, and passes on only the variables that are named."""
    cores = f":pe={resources.cores_per_rank}" if resources.cores_per_rank and site.binding == "cores" else ""
    words = ["mpirun", "-np", str(resources.ranks), "--map-by", f"ppr:{resources.ranks_per_node}:node{cores}"]
    return words + _bound(site, "--bind-to", "core") + [word for name in variables for word in ("-x", name)]


def _aprun(site: Site, resources: Resources, _: Iterable[str]) -> list[str]:
    """ALPS of older Crays."""
    words = ["aprun", "-n", str(resources.ranks), "-N", str(resources.ranks_per_node)]
    if resources.cores_per_rank:
        words += ["-d", str(resources.cores_per_rank), "-j", str(site.threads_per_core)]
    return words + _bound(site, "-cc", "depth")


def _bound(site: Site, option: str, to_cores: str) -> list[str]:
    """A launcher's option for the site's binding; where that is open, the launcher does as it does."""
    return [option, to_cores if site.binding == "cores" else "none"] if site.binding else []


LAUNCHERS: dict[str, Callable[[Site, Resources, Iterable[str]], list[str]]] = {
    "srun": _srun,
    "mpich": _mpich,
    "pals": _pals,
    "open_mpi": _open_mpi,
    "aprun": _aprun,
}
