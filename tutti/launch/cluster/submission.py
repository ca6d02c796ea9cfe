"""A recipe handed to a scheduler: everything is checked first, and a refusal leaves nothing behind."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.config.load import resolve
from tutti.config.plan import make_plan
from tutti.config.recipes import make_importable
from tutti.config.run import RunConfig
from tutti.errors import LaunchError
from tutti.launch.cluster.job_script import Job, render
from tutti.launch.cluster.resources import Resources, Wishes, settle
from tutti.launch.cluster.schedulers import scheduler_of
from tutti.launch.cluster.schedulers.commands import require
from tutti.launch.cluster.site import Site, load_site
from tutti.runs.folder import RunFolder, check_writable, create_folder, remove_folder, write_config
from tutti.runs.jobs import JobRecord, read_job


@dataclass(frozen=True)
class Submission:
    """A recipe, where it is to run, and on what."""

    recipe: str  # as it was given
    config: RunConfig
    site: Site
    resources: Resources
    max_requeues: int
    preflight: bool

    def script(self, folder: Path) -> str:
        """The job script for a run folder."""
        job = Job(
            recipe=self.config.recipe,
            site=self.site,
            resources=self.resources,
            folder=folder.absolute(),
            working_folder=Path.cwd(),
            python=sys.executable,
            python_path=os.environ.get("PYTHONPATH"),
            preflight=self.preflight,
        )
        return render(job)

    def planned_folder(self) -> Path:
        """Where the run folder will be, but for its date."""
        return Path(self.config.out) / self.config.recipe / f"DATE_TIME_n{self.resources.ranks}"


def prepare(
    recipe: str, overrides: list[str], on: str, wishes: Wishes, max_requeues: int, preflight: bool
) -> Submission:
    """Check everything that can be known before a job runs."""
    if max_requeues < 0:
        raise LaunchError(f"--max-requeues {max_requeues}: expected 0 or more.")
    make_importable(recipe)
    config = resolve(recipe, overrides).config
    site = load_site(on, Path(recipe).parent if Path(recipe).is_file() else None)
    resources = settle(wishes, site, config.recipe)
    samples = config.data.train_samples()
    make_plan(config, resources.ranks, sys.maxsize if samples is None else samples)
    return Submission(recipe, config, site, resources, max_requeues, preflight)


def hand_in(submission: Submission) -> tuple[RunFolder, str]:
    """Make the run folder with its script and submit it; the folder and the job's id."""
    site, config = submission.site, submission.config
    require_scheduler(site)
    check_writable(config.out)
    folder = create_folder(config.out, config.recipe, submission.resources.ranks)
    try:
        write_config(folder, config.as_yaml())
        write_job(submission, folder)
        job_id = submit_job(folder)
    except BaseException:
        remove_folder(folder)
        raise
    return folder, job_id


def require_scheduler(site: Site) -> None:
    """Refuse to go on where the commands of a site's scheduler are missing."""
    scheduler = scheduler_of(site.scheduler)
    require(scheduler.SUBMIT, scheduler.NAME)


def write_job(submission: Submission, folder: RunFolder) -> None:
    """Put the script and the record of a job into its run folder."""
    script = folder.job_script
    script.write_text(submission.script(folder.path))
    JobRecord(
        scheduler=submission.site.scheduler,
        site=submission.site.name,
        recipe=submission.config.recipe,
        resources=asdict(submission.resources),
        max_requeues=submission.max_requeues,
        script=script.name,
    ).write(folder)


def submit_job(folder: RunFolder, after: str | None = None) -> str:
    """Submit the job of a run folder, to start when another one has ended; its id."""
    job = read_job(folder)
    job.submitting = True
    job.write(folder)  # before the job can start and look for it
    job_id = scheduler_of(job.scheduler).submit(folder.job_script.absolute(), after)
    job.ids, job.submitting = [*job.ids, job_id], False
    job.attempts, job.cancelled = [], None
    job.write(folder)  # a job that has already started waits for this
    return job_id
