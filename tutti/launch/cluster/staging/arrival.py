"""What has arrived of a staged environment on the host of a rank."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti import units
from tutti.launch.cluster.staging.environment import CACHED

VARIABLE = "TUTTI_STAGED_ENVIRONMENT"  # the digest of the environment, and the folder of the copy if a rank uses it


@dataclass(frozen=True)
class Arrival:
    """The environment that the ranks of a host start from."""

    digest: str  # of what the job has sent
    folder: str = ""  # of the copy; empty where ranks use the shared environment
    arrived: str = ""  # the digest of the copy
    files: int = 0
    expected_files: int = 0

    @property
    def kind(self) -> str:
        """What other hosts should have too."""
        return f"the staged environment {self.arrived}" if self.folder else "the shared environment"

    def problem(self, code_folder: str) -> str | None:
        """What is wrong with the copy, given the folder from which tutti was imported."""
        if not self.folder:
            return None
        fix = f"Remove {self.folder} there, and start the job again."
        if self.arrived != self.digest:
            return f"has a copy of the environment {self.arrived or 'without a digest'}, expected {self.digest}. {fix}"
        if self.files < self.expected_files:
            have = f"{self.files:,} of {units.count(self.expected_files, 'file')}"
            return f"has lost a part of the staged environment: it has {have}. {fix}"
        if not Path(code_folder).is_relative_to(self.folder):
            return f"imports tutti from {code_folder}, expected the copy in {self.folder}. Check PYTHONPATH."
        return None


def find_arrival(env: Mapping[str, str]) -> Arrival | None:
    """Examine the copy of this host; None in a job that stages no environment."""
    digest, _, folder = env.get(VARIABLE, "").partition(" ")
    if not digest or not folder:
        return Arrival(digest) if digest else None
    try:
        arrived, expected = (Path(folder) / "complete").read_text().split()
        return Arrival(digest, folder, arrived, _count(folder), int(expected))
    except (OSError, ValueError):
        return Arrival(digest, folder)


def _count(folder: str) -> int:
    """The files of a copy, without links, compiled modules and the note of its completion."""
    total = -1
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != CACHED]
        total += sum(not os.path.islink(os.path.join(place, name)) for name in names)
    return total
