"""Whether all hosts see one and the same folder: each leaves a mark, and looks for those of the others."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.doctor.findings import Finding, fault, name_hosts

LOOK_SECONDS = 4.0


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    place = path.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def leave_mark(folder: Path, word: str, number: int) -> str | None:
    """Write this host's mark; why it cannot, or nothing."""
    if not folder.is_dir():
        return "it is not there"
    try:
        with open(_mark(folder, word, number), "w") as file:
            file.write(word)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return None


def find_marks(folder: Path, word: str, numbers: Sequence[int], seconds: float = LOOK_SECONDS) -> list[int]:
    """Whose marks are seen here; network file systems may take a moment to show them."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            names = set(os.listdir(folder))
            seen = [number for number in numbers if _mark(folder, word, number).name in names]
            if len(seen) == len(numbers):
                return seen
        if time.monotonic() > deadline:
            return [number for number in numbers if _mark(folder, word, number).is_file()]
        time.sleep(0.05)


def remove_mark(folder: Path, word: str, number: int) -> None:
    with contextlib.suppress(OSError):
        _mark(folder, word, number).unlink()


def judge_folder(
    folder: str, hosts: Sequence[str], errors: Mapping[int, str], seen: Mapping[int, list[int]]
) -> list[Finding]:
    """Hosts, by their numbers, that cannot write into the folder or have another one of that name."""
    findings = [
        fault(f"host {hosts[number]} cannot use the run's folder {folder}: {why}. Choose one that all hosts share.")
        for number, why in errors.items()
    ]
    apart = [
        number
        for number in range(len(hosts))
        if number not in errors and number > 0 and (0 not in seen.get(number, []) or number not in seen.get(0, []))
    ]
    if apart and 0 not in errors:
        findings.append(
            fault(
                f"{name_hosts([hosts[number] for number in apart])} and host {hosts[0]} do not share {folder}: what "
                "one writes there the other does not see. Choose a folder on a file system that all hosts share, "
                "with out=FOLDER."
            )
        )
    return findings


def _mark(folder: Path, word: str, number: int) -> Path:
    return folder / f".tutti-doctor-{word[:12]}-{number}"
