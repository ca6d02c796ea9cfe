"""How far a run has come, as its folder tells."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from tutti.records.folder import RunFolder
from tutti.records.metrics import parse_event

_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class Progress:
    """What was there at some moment, to tell whether there is more."""

    folder: RunFolder
    newest: str  # the durable checkpoint
    changed: int  # when the metrics were last written

    @classmethod
    def now(cls, folder: RunFolder) -> "Progress":
        return cls(folder, _newest(folder.checkpoints / "latest"), _changed(folder.metrics))

    def has_saved(self) -> bool:
        """Whether there is another checkpoint since."""
        return _newest(self.folder.checkpoints / "latest") != self.newest

    def has_trained(self) -> bool:
        """Whether the run has told of a step after its checkpoint; what it tells before may be taken back."""
        saved = int(match[1]) if (match := re.fullmatch(r"step-(\d{1,18})", self.newest)) else 0
        return _changed(self.folder.metrics) != self.changed and _last_step(self.folder.metrics) > saved


def _newest(pointer: Path) -> str:
    try:
        return pointer.read_text(errors="replace").strip()
    except OSError:
        return ""


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _last_step(metrics: Path) -> int:
    """Of the last event that can be read; a line may be half written."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")):
            if event := parse_event(line):
                return event.get("step", 0)
    return 0
