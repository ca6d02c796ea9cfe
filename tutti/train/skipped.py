"""Files that a dataset skips: named in the log of their rank, counted over all ranks, reported once an epoch."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tutti.errors import DataError
from tutti.ranks.group import Group
from tutti.runs.journal import Journal

_NAMES_SHOWN = 3


class SkippedFiles:
    """The files that the datasets of a run have skipped; does nothing where no dataset keeps a list of them."""

    def __init__(self, datasets: Iterable[Any], log: Path, group: Group, journal: Journal) -> None:
        self.names: list[str] = []  # on any rank, as of the last count
        self._datasets = tuple(datasets)
        self._listed = any(getattr(data, "skipped", None) is not None for data in self._datasets)
        self._log = log
        self._group = group
        self._journal = journal
        self._here: set[str] = set()  # files in this rank's log

    def log(self) -> None:
        """Write the files that this rank has newly skipped into its log, and remove them from the lists."""
        if not self._listed:
            return
        for data in self._datasets:
            taken = getattr(data, "skipped", None)
            if not taken:
                continue
            new = sorted(set(taken) - self._here)
            taken.clear()
            self._here.update(new)
            with contextlib.suppress(OSError), open(self._log, "a") as log:
                log.writelines(f"skipped {name}: it cannot be decoded\n" for name in new)

    def count(self) -> None:
        """Gather the skipped files of all ranks; every rank enters."""
        if self._listed:
            found = self._group.gather(self._here.difference(self.names))
            self.names = sorted(set(self.names).union(*found))

    def report(self) -> dict[str, int]:
        """Print how many files have been skipped, and return the number for the record; every rank enters."""
        if not self._listed:
            return {}
        self.count()
        if self.names:
            shown = ", ".join(self.names[:_NAMES_SHOWN]) + (", ..." if len(self.names) > _NAMES_SHOWN else "")
            self._journal.say(f"{len(self.names):,} image(s) skipped so far, since they cannot be decoded: {shown}")
        return {"skipped_images": len(self.names)}

    def check_some_left(self, means: dict[str, float], samples: int) -> None:
        """Stop when no rank had a validation image to measure; every rank enters with the same means."""
        if means or not self._listed:
            return
        error = DataError(
            f"none of the {samples:,} validation images can be decoded: expected at least one. "
            "Their names are in the logs of the ranks; replace them."
        )
        error.agreed = True
        raise error
