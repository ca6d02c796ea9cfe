"""What all ranks must agree on before a run begins or goes on, whichever framework it is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tutti.checkpoint.manifest import Manifest, verify
from tutti.config.plan import Plan
from tutti.config.run import RunConfig
from tutti.errors import CheckpointError, TuttiError
from tutti.ranks.group import Group

Built = TypeVar("Built")


def agreed(group: Group, build: Callable[[], Built]) -> Built:
    """Build on every rank, or raise on every rank."""
    error: TuttiError | None = None
    built: list[Built] = []
    try:
        built.append(build())
    except TuttiError as found:
        error = found
    group.agree(error)
    return built[0]


def verified_on_first(resume: Path, group: Group) -> Manifest:
    """The manifest of a checkpoint whose every byte rank 0 has read; every rank enters."""
    error: TuttiError | None = None
    manifest: Manifest | None = None
    try:
        manifest = verify(resume) if group.is_first else None
    except CheckpointError as found:
        error = found
    error, manifest = group.from_first((error, manifest))
    if error or manifest is None:
        raise error or CheckpointError(f"checkpoint {resume} cannot be read.")
    return manifest


def check_samples(resume: Path, manifest: Manifest, config: RunConfig, plan: Plan) -> None:
    """Refuse a checkpoint after which other samples would follow than those that are missing."""
    here = {
        "seed": config.seed,
        "global batch": plan.global_batch,
        "batch.micro": config.batch.micro,
        "number of training samples": plan.train_samples,
    }
    there = (manifest.seed, manifest.global_batch, manifest.micro_batch, manifest.train_samples)
    for (name, now), then in zip(here.items(), there, strict=True):
        if now != then:
            fix = f" Set batch.global={then}." if name == "global batch" else ""
            raise CheckpointError(
                f"checkpoint {resume} was made with {name} {then}, this run has {now}: "
                f"its samples would not be the ones that are missing.{fix}"
            )
    if manifest.step > plan.total_steps:
        raise CheckpointError(f"checkpoint {resume} is at step {manifest.step}, this run ends at {plan.total_steps}.")
