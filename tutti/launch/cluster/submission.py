"""The job script of a run, and its submission: everything is checked first, and a refusal leaves nothing behind."""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tutti.config.check import check_noise_scale, missing_data
from tutti.config.load import resolve
from tutti.config.plan import make_plan
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import LaunchError
from tutti.launch.cluster.resources import Resources, Site, Wishes, load_site, settle
from tutti.launch.cluster.schedulers import require, scheduler_of
from tutti.launch.cluster.staging import script as stage
from tutti.launch.cluster.staging.archive import pack
from tutti.launch.cluster.staging.environment import find_environment
from tutti.ranks.secret import FILE_VARIABLE, make_secret, write_secret
from tutti.runs.folder import RunFolder, check_writable, create_folder, remove_folder, write_config
from tutti.runs.jobs import JobRecord, changed_job

# A rank that ends must not end the others: their exit codes and notes show the first cause. Those that have not ended
# by themselves after this time are ended.
_GRACE_SECONDS = 60
_ARCHIVES = ".environments"  # beside the run folders of all recipes
_SECRET = "secret"  # the file in the run folder by which the ranks of its jobs recognise each other


def launcher_command(site: Site, resources: Resources, variables: Iterable[str]) -> str:
    """Return the launcher that stands before the command of a rank; the rank needs these variables."""
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
    """Open MPI's mpirun, which knows the nodes of the allocation except under Cobalt, and passes on named variables."""
    cores = f":pe={resources.cores_per_rank}" if resources.cores_per_rank and site.binding == "cores" else ""
    words = ["mpirun", *(["--hostfile", '"$COBALT_NODEFILE"'] if site.scheduler == "cobalt" else [])]
    words += ["-np", str(resources.ranks), "--map-by", f"ppr:{resources.ranks_per_node}:node{cores}"]
    return words + _bound(site, "--bind-to", "core") + [word for name in variables for word in ("-x", name)]


def _aprun(site: Site, resources: Resources, _: Iterable[str]) -> list[str]:
    """ALPS of older Crays: -d counts hardware threads, of which -j says how many a core has."""
    words = ["aprun", "-n", str(resources.ranks), "-N", str(resources.ranks_per_node)]
    if threads := _threads_per_rank(site, resources):
        words += ["-d", str(threads), "-j", str(site.threads_per_core)]
    return words + _bound(site, "-cc", "depth")


def _threads_per_rank(site: Site, resources: Resources) -> int | None:
    """The threads that compute on a rank: one for each core, and under aprun one for each hardware thread of -j."""
    if resources.cores_per_rank is None:
        return None
    return resources.cores_per_rank * (site.threads_per_core if site.launcher == "aprun" else 1)


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
class JobScript:
    """The content of a job script."""

    recipe: str
    site: Site
    resources: Resources
    folder: Path  # of the run, absolute
    working_folder: Path  # relative paths of the recipe start here
    python: str  # the Python that submits
    python_path: str | None = None
    preflight: bool = False
    staging: stage.Staging | None = None


def render(job: JobScript) -> str:
    """Return the text of the script."""
    parts = (_head, _place, _software, _environment, _command, _begin, _stage, _launch, _end)
    return "\n\n".join(text for part in parts if (text := "\n".join(part(job)))) + "\n"


def _head(job: JobScript) -> Iterator[str]:
    scheduler = scheduler_of(job.site.scheduler)
    yield "#!/bin/bash"
    yield f"# {job.recipe} on {job.resources.describe()}, written by `tutti submit --on {job.site.name}`."
    values = scheduler.values(job.site, job.resources, job.folder / "logs")
    for name, template in (scheduler.DIRECTIVES | job.site.directives).items():
        if (value := values.get(name)) is not None:
            yield f"{scheduler.PREFIX} {template.format(value)}"
    for directive in job.resources.directives:
        yield f"{scheduler.PREFIX} {directive}"


def _place(job: JobScript) -> Iterator[str]:
    scheduler = scheduler_of(job.site.scheduler)
    yield "# The run, and where relative paths of its recipe start."
    yield f"FOLDER={shlex.quote(str(job.folder))}"
    yield f"cd {shlex.quote(str(job.working_folder))} || exit"
    if scheduler.NAME != "slurm":
        yield "# The scheduler writes its output at the end of the job; this file can be followed before."
        yield f'exec >>"$FOLDER/logs/job-${scheduler.JOB_ID}.out" 2>&1'


def _software(job: JobScript) -> Iterator[str]:
    site = job.site
    yield "# The software."
    yield from (f"module use {shlex.quote(path)}" for path in site.module_paths)
    yield from (f"module load {shlex.quote(name)}" for name in site.modules)
    yield from site.activate.splitlines()
    yield "set -u  # not earlier: modules and environments use unset variables"
    if site.container is None:
        yield f"PYTHON={shlex.quote(site.python or job.python)}"
    else:
        yield f"PYTHON={shlex.quote(job.python)}"
        yield f"RANK_PYTHON={shlex.quote(site.python or 'python')}  # inside the container"


def _environment(job: JobScript) -> Iterator[str]:
    yield "# The environment of the ranks; the first variable is the end of the allocation."
    yield from scheduler_of(job.site.scheduler).end_time(job.resources.seconds)
    for name, value in _variables(job).items():
        yield f"export {name}={value}"


def _command(job: JobScript) -> Iterator[str]:
    yield "# How a command of tutti is started on every rank."
    if job.site.launcher == "srun" and not job.resources.equal:
        yield "unset SLURM_NTASKS_PER_NODE  # the most on a node: srun would take it for the number on each"
    line = launcher_command(job.site, job.resources, _variables(job))
    python = f'{job.site.container} "$RANK_PYTHON"' if job.site.container else '"$PYTHON"'
    if job.staging is None:
        yield f"ranks=(\n  {line}\n  {python} -m tutti\n)"
        return
    yield f'ranks=(\n  {line}\n  bash "$FOLDER/{stage.NAME}" run -m tutti\n)'
    one = replace(job.resources, ranks=job.resources.nodes, ranks_per_node=1, cores_per_rank=None, gpus_per_node=None)
    line = launcher_command(job.site.model_copy(update={"binding": None}), one, _variables(job))
    line = line.replace(f"--wait={_GRACE_SECONDS}", "--wait=0")  # a node may take longer than others
    yield "# And how the environment is staged, once on every node."
    yield f'nodes=(\n  {line}\n  bash "$FOLDER/{stage.NAME}"\n)'
    yield f'job="${scheduler_of(job.site.scheduler).JOB_ID}"'


def _begin(job: JobScript) -> Iterator[str]:
    yield "# Has the run been started too often, or been cancelled? Then the job ends here."
    yield f'"$PYTHON" -m tutti requeue "$FOLDER" --begin "${scheduler_of(job.site.scheduler).JOB_ID}" || exit'


def _stage(job: JobScript) -> Iterator[str]:
    if job.staging is not None:
        yield from stage.stage_lines()


def _launch(job: JobScript) -> Iterator[str]:
    yield "# The shell survives these signals, and notes a SIGTERM; the ranks save and end."
    yield "told="
    yield "trap 'told=yes' TERM"
    yield "trap : USR1"
    yield "# Training resumes from the newest checkpoint, or begins where there is none."
    yield '"${ranks[@]}" train "$FOLDER"' + (" --preflight" if job.preflight else "")
    yield "code=$?"


def _end(job: JobScript) -> Iterator[str]:
    yield "# By the exit code, the run is complete, is requeued, or has failed."
    yield '"$PYTHON" -m tutti requeue "$FOLDER" --code "$code" ${told:+--told}'
    if job.staging is not None:
        yield from stage.remove_lines()


def _variables(job: JobScript) -> dict[str, str]:
    """Return the environment of the ranks, quoted for the shell."""
    site = job.site
    variables = {"TUTTI_JOB_ENDS": '"$ends"', "TUTTI_FAILURE_NOTES": '"$FOLDER/logs/notes"'}
    variables[FILE_VARIABLE] = f'"$FOLDER/{_SECRET}"'
    if job.python_path:
        variables["PYTHONPATH"] = shlex.quote(job.python_path)
    if threads := _threads_per_rank(site, job.resources):
        variables["OMP_NUM_THREADS"] = str(threads)
    if site.interface:
        variables |= {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    return variables | {name: shlex.quote(value) for name, value in site.environment.items()}


@dataclass(frozen=True)
class Submission:
    """A recipe, where it is to run, and on what."""

    recipe: str  # as it was given
    config: RunConfig
    site: Site
    resources: Resources
    max_requeues: int
    preflight: bool
    staging: stage.Staging | None = None

    def script(self, folder: Path) -> str:
        """Return the job script for a run folder."""
        job = JobScript(
            recipe=self.config.recipe,
            site=self.site,
            resources=self.resources,
            folder=folder.absolute(),
            working_folder=Path.cwd(),
            python=sys.executable,
            python_path=os.environ.get("PYTHONPATH"),
            preflight=self.preflight,
            staging=self.staging,
        )
        return render(job)

    def stage_script(self, folder: Path, tell: Callable[[str], None]) -> str | None:
        """Pack the environment if it is to be staged; return the script of the nodes."""
        if self.staging is None:
            return None
        python = self.site.python or sys.executable
        archives = Path(self.config.out).absolute() / _ARCHIVES
        packed = pack(find_environment(python), archives, tell)
        return stage.render(self.staging, packed, python, Path.cwd(), folder.absolute())

    def planned_folder(self) -> Path:
        """Return the path of the future run folder, with a placeholder for its date."""
        return Path(self.config.out) / self.config.recipe / f"DATE_TIME_n{self.resources.ranks}"


def describe_missing_data(configs: Sequence[RunConfig]) -> str:
    """Say which data of some jobs is not here; the nodes may see it all the same. Empty if there is all of it."""
    missing = missing_data(configs)
    if not missing:
        return ""
    are, it = ("is", "it") if len(missing) == 1 else ("are", "them")
    keys = "data.train and data.valid to files" if configs[0].data.name == "nbody" else "data.path to a folder"
    return (
        f"warning: {', '.join(missing)}, where the recipe reads its data, {are} not visible from here. If the nodes do "
        f"not see {it} either, fetch {it} (tutti data get) or set {keys} of a shared file system."
    )


def prepare(
    recipe: str,
    overrides: list[str],
    on: str,
    wishes: Wishes,
    max_requeues: int,
    preflight: bool,
    staging: stage.StagingWishes = stage.StagingWishes(),
) -> Submission:
    """Check everything that can be known before a job runs."""
    if max_requeues < 0:
        raise LaunchError(f"--max-requeues {max_requeues}: expected 0 or more.")
    make_importable(recipe)
    config = resolve(recipe, overrides).config
    site = load_site(on, Path(recipe).parent if Path(recipe).is_file() else None)
    resources = settle(wishes, site, config.recipe)
    check_noise_scale(config, resources.ranks)
    samples = config.data.train_samples()
    make_plan(config, resources.ranks, sys.maxsize if samples is None else samples, resources.ranks_per_node)
    return Submission(recipe, config, site, resources, max_requeues, preflight, stage.choose_staging(site, *staging))


def submit_run(submission: Submission, tell: Callable[[str], None] = print) -> tuple[RunFolder, str]:
    """Make the run folder with its scripts and submit it; return the folder and the id of the job."""
    site, config = submission.site, submission.config
    require_scheduler(site)
    check_writable(config.out)
    folder = create_folder(config.out, config.recipe, submission.resources.ranks)
    try:
        write_config(folder, config.as_yaml())
        write_job(submission, folder, tell)
        job_id = submit_job(folder)
    except BaseException:
        remove_folder(folder)
        raise
    return folder, job_id


def require_scheduler(site: Site) -> None:
    """Raise an error if the commands of the site's scheduler are missing."""
    scheduler = scheduler_of(site.scheduler)
    require(scheduler.SUBMIT, scheduler.NAME)


def write_job(submission: Submission, folder: RunFolder, tell: Callable[[str], None] = print) -> None:
    """Put the scripts and the record of a job into its run folder."""
    if (text := submission.stage_script(folder.path, tell)) is not None:
        (folder.path / stage.NAME).write_text(text)
    script = folder.job_script
    script.touch(mode=0o700)  # it may hold variables that are nobody else's business
    script.write_text(submission.script(folder.path))
    JobRecord(
        scheduler=submission.site.scheduler,
        site=submission.site.name,
        recipe=submission.config.recipe,
        resources=asdict(submission.resources),
        max_requeues=submission.max_requeues,
        script=script.name,
    ).write(folder)
    secret = folder.path / _SECRET
    if not secret.exists():
        write_secret(secret, make_secret())


def submit_job(folder: RunFolder, after: str | None = None) -> str:
    """Submit the job of a run folder, to start when another one has ended; return its id."""
    with changed_job(
        folder
    ) as job:  # before the job can start and look for it; what is cancelled from here on stays so
        job.submitting, job.attempts, job.cancelled = True, [], None
    job_id = scheduler_of(job.scheduler).submit(folder.job_script.absolute(), after)
    with changed_job(folder) as job:  # a job that has already started waits for this
        job.ids += [job_id] if job_id not in job.ids else []
        job.submitting = False
    return job_id
