"""The script by which nodes get the environment and ranks start from it, and the lines of a job script that call it."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tutti.errors import LaunchError
from tutti.launch.cluster.resources import Site
from tutti.launch.cluster.staging.archive import Packed

NAME = "stage.sh"  # in the run folder
DEFAULT_DISK = "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}"
_NODES = Path(__file__).with_name("node.sh")
_DISK = re.compile(r"(/|\$)[\w/.$:{}-]*")


@dataclass(frozen=True)
class Staging:
    """How the environment of a job is staged."""

    disk: str = DEFAULT_DISK  # the folder of the nodes' own disks; variables are those of the node
    keep: bool = False  # the copies stay on the nodes at the end of the job

    def __post_init__(self) -> None:
        if not _DISK.fullmatch(self.disk):
            raise LaunchError(
                f"--local-disk {self.disk}: expected an absolute path or one that begins with a variable of the nodes, "
                "for example /local/scratch or '$SLURM_TMPDIR'."
            )


class StagingWishes(NamedTuple):
    """What is given on a command line; None is the site's."""

    wanted: bool | None = None
    disk: str | None = None
    keep: bool = False


def choose_staging(
    site: Site, wanted: bool | None = None, disk: str | None = None, keep: bool = False
) -> Staging | None:
    """Return how the environment is staged, if it is; what is not given on the command line is the site's."""
    if not (site.stage_environment if wanted is None else wanted):
        if disk or keep:
            raise LaunchError("--local-disk and --keep-staged need --stage-environment: expected all or none of them.")
        return None
    if site.container:
        raise LaunchError(
            f"--stage-environment at {site.name}: the ranks run in a container ({site.container.split()[0]}), whose "
            "image is already on the nodes. Leave the option out, or choose a site without a container."
        )
    return Staging(disk or site.local_disk or DEFAULT_DISK, keep or site.keep_staged)


def render(staging: Staging, packed: Packed, shared_python: str, working_folder: Path, folder: Path) -> str:
    """Return the text of the script for one environment."""
    environment, archives = packed.environment, packed.archives
    # The archives and what they become are on the disk at the same time.
    needed = sum(each.bytes + each.disk_bytes for each in archives) // 1024 + 1024
    lines = [
        "#!/bin/bash",
        "# Copies a Python environment to the disks of the nodes and starts ranks from it; called by job.sh.",
        f"DIGEST={packed.digest}",
        f'LOCAL="{staging.disk}"',
        f"KEEP={'yes' if staging.keep else ''}",
        f"CACHE={shlex.quote(str(packed.folder))}",
        _array("ARCHIVES", (each.name for each in archives)),
        _array("SUMS", (each.sha256 for each in archives)),
        _array("LAYERS", (each.name for each in environment.layers)),
        f"NEEDED_KB={needed}",
        f"PYTHON={shlex.quote(environment.python)}",
        f"LIBRARY={shlex.quote(environment.library or '')}",
        f"VIRTUAL={'yes' if environment.is_virtual else ''}",
        f"SYSTEM_SITES={'true' if environment.system_sites else 'false'}",
        f"SITE_PACKAGES={shlex.quote(environment.site_packages)}",
        _array("BEFORE", environment.before),
        _array("AFTER", environment.after),
        f"WORKING_COPY={shlex.quote(environment.shared.get(str(working_folder), ''))}",
        f"SHARED_PYTHON={shlex.quote(shared_python)}",
        f"WANTED={shlex.quote(str(folder / '.stage-wanted'))}",
        "NODE_FILE=${PBS_NODEFILE:-${COBALT_NODEFILE:-}}",
    ]
    return "\n".join(lines) + "\n" + _NODES.read_text()


def _array(name: str, words: Iterable[str]) -> str:
    return f"{name}=({' '.join(map(shlex.quote, words))})"


def stage_lines() -> Iterator[str]:
    """The lines of a job script that copy the environment to the nodes."""
    yield "# The environment is copied to the disk of every node; where that fails, the shared one is used."
    yield "begin=$SECONDS"
    yield '"${nodes[@]}" prepare "$job"'
    yield f'bash "$FOLDER/{NAME}" broadcast "$job"'
    yield '"${nodes[@]}" unpack "$job"'
    yield 'echo "tutti: the environment was staged in $((SECONDS - begin)) s."'


def remove_lines() -> Iterator[str]:
    """The lines of a job script that remove the copies; on Slurm a requeued job has ended before them."""
    yield "last=$?"
    yield '"${nodes[@]}" remove "$job"'
    yield 'exit "$last"'
