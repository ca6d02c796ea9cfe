"""How jobs are started: from Python by `run`, from a shell by `horovodrun`."""

from tutti.horovod.run.call import run

__all__ = ["run"]
