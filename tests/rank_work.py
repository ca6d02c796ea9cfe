"""What ranks do in the tests of the runtime; each function runs on every rank."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from tutti.config.schema import DdpConfig, RuntimeConfig
from tutti.errors import ConfigError
from tutti.parallel.ddp import spread
from tutti.parallel.host_memory import share_memory
from tutti.runtime.discovery import discover
from tutti.runtime.group import Group, join


def join_all(**runtime: Any) -> Group:
    return join(discover(os.environ), RuntimeConfig(**runtime))


def sum_and_gather() -> tuple[float, list[str], str]:
    group = join_all()
    name = f"rank {group.rank}"
    answer = group.sum(torch.tensor(group.rank + 1.0)).item(), group.gather(name), group.from_first(name)
    group.leave()
    return answer


def join_without_rank_1(seconds: float) -> None:
    if os.environ["RANK"] != "1":
        join_all(start_timeout_seconds=seconds)


def arrive_late(missing: tuple[int, ...], seconds: float) -> None:
    group = join_all()
    if group.rank in missing:
        time.sleep(2 * seconds)  # stays away, and alive, until the others have given up
    else:
        group.barrier("lunch", seconds)


def agree_on_errors(errors: dict[int, str]) -> None:
    group = join_all()
    text = errors.get(group.rank)
    group.agree(ConfigError(text) if text else None)


def meet_at_a_taken_port() -> None:
    if os.environ["RANK"] == "0":
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", int(os.environ["MASTER_PORT"])))
            taken.listen()
            join_all(start_timeout_seconds=5)


def average_many(rounds: int) -> tuple[list[float], list[str]]:
    """Means of tensors that differ by rank and round, taken as fast as the ranks can; and what is left in memory."""
    group = join_all()
    memory = share_memory(group, 1 << 16)
    assert memory is not None
    means = []
    for turn in range(rounds):
        tensor = torch.full((1 + turn % 7, 3), float(group.rank + turn), dtype=(torch.float32, torch.float64)[turn % 2])
        if turn % 5 == group.rank:
            time.sleep(0.001)  # another rank runs ahead each time
        mean = memory.average(tensor)
        assert mean.data_ptr() == tensor.data_ptr() and (tensor == tensor[0, 0]).all()
        means.append(tensor[0, 0].item())
    left = [path.name for path in Path("/dev/shm").glob("tutti-*")]
    group.leave()
    memory.close()
    return means, left


def average_without_rank_1() -> None:
    group = join_all(timeout_seconds=60)
    memory = share_memory(group, 1 << 16)
    assert memory is not None
    if group.rank == 1:
        os._exit(3)
    memory.average(torch.ones(4))


def swap_with_a_silent_rank(seconds: float) -> None:
    group = join_all(timeout_seconds=seconds)
    model = spread(torch.nn.Linear(4, 2), DdpConfig(), group, torch.device("cpu"))
    if group.rank == 0:
        model(torch.ones(1, 4)).sum().backward()
    else:
        time.sleep(2 * seconds)  # alive, but never in its backward pass
