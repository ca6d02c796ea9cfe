"""The job script of a run, and the line in it that starts the ranks."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tutti.launch.cluster.resources import Resources
from tutti.launch.cluster.schedulers import scheduler_of
from tutti.launch.cluster.site import Site

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


@dataclass(frozen=True)
class Job:
    """Everything that a script says."""

    recipe: str
    site: Site
    resources: Resources
    folder: Path  # of the run, absolute
    working_folder: Path  # relative paths of the recipe start here
    python: str  # the Python that submits
    python_path: str | None = None
    preflight: bool = False


def render(job: Job) -> str:
    """The text of the script."""
    parts = (_head, _place, _software, _environment, _command, _begin, _launch, _end)
    return "\n\n".join(text for part in parts if (text := "\n".join(part(job)))) + "\n"


def _head(job: Job) -> Iterator[str]:
    scheduler = scheduler_of(job.site.scheduler)
    yield "#!/bin/bash"
    yield f"# {job.recipe} on {job.resources.describe()}, written by `tutti submit --on {job.site.name}`."
    told = scheduler.values(job.site, job.resources, job.folder / "logs")
    for word, template in (scheduler.DIRECTIVES | job.site.directives).items():
        if (value := told.get(word)) is not None:
            yield f"{scheduler.PREFIX} {template.format(value)}"
    for directive in job.resources.directives:
        yield f"{scheduler.PREFIX} {directive}"


def _place(job: Job) -> Iterator[str]:
    scheduler = scheduler_of(job.site.scheduler)
    yield "# The run, and where relative paths of its recipe start."
    yield f"FOLDER={shlex.quote(str(job.folder))}"
    yield f"cd {shlex.quote(str(job.working_folder))} || exit"
    if scheduler.NAME != "slurm":
        yield "# The scheduler brings its output at the end of the job: here it can be followed."
        yield f'exec >>"$FOLDER/logs/job-${scheduler.JOB_ID}.out" 2>&1'


def _software(job: Job) -> Iterator[str]:
    site = job.site
    yield "# The software."
    yield from (f"module use {shlex.quote(path)}" for path in site.module_paths)
    yield from (f"module load {shlex.quote(name)}" for name in site.modules)
    yield from site.activate.splitlines()
    yield "set -u  # not earlier: modules and environments use variables that are not set"
    if site.container is None:
        yield f"PYTHON={shlex.quote(site.python or job.python)}"
    else:
        yield f"PYTHON={shlex.quote(job.python)}"
        yield f"RANK_PYTHON={shlex.quote(site.python or 'python')}  # inside the container"


def _environment(job: Job) -> Iterator[str]:
    yield "# What the ranks find in their environment, first of all when the allocation ends."
    yield from scheduler_of(job.site.scheduler).end_time(job.resources.seconds)
    for name, value in _variables(job).items():
        yield f"export {name}={value}"


def _command(job: Job) -> Iterator[str]:
    yield "# How a command of tutti is started on every rank."
    if job.site.launcher == "srun" and not job.resources.equal:
        yield "unset SLURM_NTASKS_PER_NODE  # the most on a node: srun would take it for the number on each"
    line = launch_line(job.site, job.resources, _variables(job))
    python = f'{job.site.container} "$RANK_PYTHON"' if job.site.container else '"$PYTHON"'
    yield f"ranks=(\n  {line}\n  {python} -m tutti\n)"


def _begin(job: Job) -> Iterator[str]:
    yield "# Has the run been started too often, or been cancelled? Then the job ends here."
    yield f'"$PYTHON" -m tutti requeue "$FOLDER" --begin "${scheduler_of(job.site.scheduler).JOB_ID}" || exit'


def _launch(job: Job) -> Iterator[str]:
    yield "# The shell outlives these signals, and remembers that it was told to end; the ranks save and end."
    yield "told="
    yield "trap 'told=yes' TERM"
    yield "trap : USR1"
    yield "# Training goes on from the newest checkpoint, or begins where there is none."
    yield '"${ranks[@]}" train "$FOLDER"' + (" --preflight" if job.preflight else "")
    yield "code=$?"


def _end(job: Job) -> Iterator[str]:
    yield "# What follows from the exit code: the run is complete, is started again, or has failed."
    yield '"$PYTHON" -m tutti requeue "$FOLDER" --code "$code" ${told:+--told}'


def _variables(job: Job) -> dict[str, str]:
    """The environment of the ranks, in words of the shell."""
    site = job.site
    variables = {"TUTTI_JOB_ENDS": '"$ends"', "TUTTI_FAILURE_NOTES": '"$FOLDER/logs/notes"'}
    if job.python_path:
        variables["PYTHONPATH"] = shlex.quote(job.python_path)
    if job.resources.cores_per_rank:
        variables["OMP_NUM_THREADS"] = str(job.resources.cores_per_rank)
    if site.interface:
        variables |= {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    return variables | {name: shlex.quote(value) for name, value in site.environment.items()}
