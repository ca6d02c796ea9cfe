"""How jobs are started: from Python by `run`, from a shell by `horovodrun`."""

from tutti.launch.call import run

__all__ = ["run"]
