"""A recipe handed to a scheduler: everything is checked first, and a refusal leaves nothing behind."""

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.config.load import resolve
from tutti.config.plan import make_plan
from tutti.config.run import RunConfig
from tutti.errors import LaunchError
from tutti.launch.job_script import Job, render
from tutti.launch.local import make_importable
from tutti.launch.resources import Resources, Wishes, settle
from tutti.launch.schedulers import scheduler_of
from tutti.launch.schedulers.asking import require
from tutti.launch.site import Site, load_site
from tutti.records.folder import RunFolder, check_writable, create_folder, remove_folder, write_config
from tutti.records.jobs import JobRecord


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
    scheduler = scheduler_of(site.scheduler)
    require(scheduler.SUBMIT, scheduler.NAME)
    check_writable(config.out)
    folder = create_folder(config.out, config.recipe, submission.resources.ranks)
    try:
        write_config(folder, config.as_yaml())
        script = folder.job_script
        script.write_text(submission.script(folder.path))
        job = JobRecord(
            scheduler=site.scheduler,
            site=site.name,
            recipe=config.recipe,
            resources=asdict(submission.resources),
            max_requeues=submission.max_requeues,
            script=script.name,
            submitting=True,
        )
        job.write(folder)  # before the job can start and look for it
        job_id = scheduler.submit(script.absolute())
    except BaseException:
        remove_folder(folder)
        raise
    job.ids, job.submitting = [job_id], False
    job.write(folder)  # a job that has already started waits for this
    return folder, job_id
