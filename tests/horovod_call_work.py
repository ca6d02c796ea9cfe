"""What ranks do for the tests of `horovod.run`; torch is imported only where it is used, for a quick start."""

import os
import signal
from typing import Any


def add_up(value: float, times: int = 1) -> tuple[int, float]:
    import torch

    import tutti.horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.allreduce(torch.tensor([value * times]), op=hvd.Sum).item()


def fail_on_rank_1() -> None:
    if os.environ["HOROVOD_RANK"] == "1":
        raise KeyError("rank 1 has had enough")


def die_on_rank_1() -> None:
    if os.environ["HOROVOD_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def give_back_what_cannot_travel() -> Any:
    return (number for number in range(3))
