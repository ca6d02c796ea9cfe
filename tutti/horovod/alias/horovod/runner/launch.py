"""The command `horovodrun`."""

from tutti.horovod.run.arguments import HOROVOD_VERSION as __version__
from tutti.horovod.run.command import run_commandline

__all__ = ["__version__", "run_commandline"]

if __name__ == "__main__":
    run_commandline()
