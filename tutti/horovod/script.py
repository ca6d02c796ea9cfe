"""A user's script run as a rank, with the environment variables of torchrun and its output in a log."""

import atexit
import os
import runpy
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from tutti.errors import ConfigError, LaunchError
from tutti.horovod.alias import SITE_FOLDER, install_finder, other_horovod
from tutti.ranks.cores import threads_per_rank
from tutti.ranks.placement import Placement
from tutti.runs.folder import RunFolder
from tutti.runs.output import Tee, captured_output


def check_script(path: str) -> None:
    """Raise ConfigError for a script that does not exist."""
    if not Path(path).is_file():
        raise ConfigError(f"script {path!r}: no such file in {Path.cwd()}. Give the path of a Python file.")


def offer_horovod() -> str | None:
    """Make `import horovod` find tutti's package, unless a real Horovod is installed; describe that one."""
    if version := other_horovod():
        return f"Horovod {version} is installed"
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:  # not a package, but perhaps a folder of that name
        sys.path.append(str(SITE_FOLDER))
    elif b"tutti" not in Path(spec.origin).read_bytes():
        return f"found in {spec.origin}"
    install_finder()
    return None


def run_script(path: str, arguments: list[str], placement: Placement, folder: RunFolder | None) -> None:
    """Run a script in this process as `python script.py arguments` would."""
    if placement.world_size > 1 and (placement.address is None or placement.port is None):
        raise LaunchError(f"{placement.launcher} does not say where rank 0 is. Set MASTER_ADDR and MASTER_PORT.")
    os.environ |= {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "MASTER_ADDR": placement.address or "127.0.0.1",
        "MASTER_PORT": str(placement.port or 29_500),
        "OMP_NUM_THREADS": str(threads_per_rank(placement.local_size, os.environ)),
    }
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).parent.resolve())
    other = offer_horovod()
    if other and placement.rank == 0 and b"horovod" in Path(path).read_bytes():
        print(f"import horovod: {other}, which tutti does not replace", file=sys.stderr)
    if folder is None:
        runpy.run_path(path, run_name="__main__")
        return
    with captured_output(folder.log(placement.rank), on_screen=placement.rank == 0):
        try:
            runpy.run_path(path, run_name="__main__")
            atexit._run_exitfuncs()  # the script's own, while its output is captured: the rank exits without them
        except Exception:
            traceback.print_exc(file=sys.stderr.log if isinstance(sys.stderr, Tee) else None)
            raise
