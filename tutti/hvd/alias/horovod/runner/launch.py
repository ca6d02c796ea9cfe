"""The command `horovodrun`."""

from tutti.launch.horovodrun import run_commandline
from tutti.launch.horovodrun_options import HOROVOD_VERSION as __version__

__all__ = ["__version__", "run_commandline"]

if __name__ == "__main__":
    run_commandline()
