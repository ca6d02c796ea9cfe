"""What ranks do in the tests of the runtime; each function runs on every rank."""

import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.config.schema import DdpConfig, RuntimeConfig
from tutti.errors import ConfigError
from tutti.parallel.ddp import share_memory, wrap_model
from tutti.ranks import store
from tutti.ranks.environments import discover
from tutti.ranks.group import Group, join
from tutti.ranks.messages import listen

PATIENT_SECONDS = 600.0  # for ranks of which none is missing


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


def arrive_late(missing: tuple[int, ...], seconds: float, folder: Path) -> None:
    group = join_all()
    group.barrier("the beginning", PATIENT_SECONDS)
    if group.rank in missing:
        _stay_until_others_end(group.world_size - len(missing), folder)
    else:
        try:
            group.barrier("the second barrier", seconds)
        finally:
            (folder / str(group.rank)).touch()


def _stay_until_others_end(others: int, folder: Path) -> None:
    """Stay away, and alive, until the other ranks have given up."""
    while len(list(folder.iterdir())) < others:
        time.sleep(0.05)


def agree_on_errors(errors: dict[int, str]) -> None:
    group = join_all()
    text = errors.get(group.rank)
    group.agree(ConfigError(text) if text else None)


def meet_at_a_taken_port() -> None:
    if os.environ["RANK"] == "0":
        with socket.create_server(("", int(os.environ["MASTER_PORT"]))):
            join_all(start_timeout_seconds=PATIENT_SECONDS)


def meet_after_an_earlier_rank_0() -> float | None:
    """The third process holds the store of an agent, and is rank 0 of the start before."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    patience = timedelta(seconds=PATIENT_SECONDS)
    held = {"is_master": True, "master_listen_fd": listen(port, "127.0.0.1").detach()} if rank == 2 else {}
    agent = dist.TCPStore("127.0.0.1", port, timeout=patience, wait_for_workers=False, **held)
    if rank == 2:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        store.meet(discover(os.environ), PATIENT_SECONDS).hub.close(0.0)
        agent.set("there", "")
        agent.wait(["met/0", "met/1"])
        return None
    connect = store._connect

    def noted(*given: Any) -> Any:
        agent.set("looked", "")
        return connect(*given)

    store._connect = noted  # of rank 1, which reads the address before rank 0 writes its own
    agent.wait(["there"] if rank else ["looked"])
    group = join_all(start_timeout_seconds=PATIENT_SECONDS)
    found = group.sum(torch.tensor(1.0)).item()
    group.leave()
    agent.set(f"met/{rank}", "")
    return found


def average_many(rounds: int) -> tuple[list[float], list[str]]:
    """Means of tensors that differ by rank and round, taken as fast as the ranks can; and what is left in memory."""
    group = join_all()
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp
    tempfile.mkdtemp = lambda **options: made.append(mkdtemp(**options)) or made[-1]
    memory = share_memory(group, 1 << 16)
    assert memory is not None and len(made) == (group.rank == 0)
    means = []
    for turn in range(rounds):
        tensor = torch.full((1 + turn % 7, 3), float(group.rank + turn), dtype=(torch.float32, torch.float64)[turn % 2])
        if turn % 5 == group.rank:
            time.sleep(0.001)  # another rank runs ahead each time
        mean = memory.average(tensor)
        assert mean.data_ptr() == tensor.data_ptr() and (tensor == tensor[0, 0]).all()
        means.append(tensor[0, 0].item())
    left = [path for path in made if Path(path).exists()]
    group.leave()
    memory.close()
    return means, left


def average_without_rank_1() -> None:
    group = join_all(timeout_seconds=PATIENT_SECONDS)
    memory = share_memory(group, 1 << 16)
    assert memory is not None
    if group.rank == 1:
        os._exit(3)
    memory.average(torch.ones(4))


def swap_with_a_silent_rank(seconds: float, folder: Path) -> None:
    group = join_all(timeout_seconds=seconds)
    model = wrap_model(torch.nn.Linear(4, 2), DdpConfig(), group, torch.device("cpu"))
    if group.rank == 0:
        try:
            model(torch.ones(1, 4)).sum().backward()
        finally:
            (folder / "0").touch()
    else:  # alive, but never in its backward pass
        _stay_until_others_end(1, folder)


def convolutions(batch_norm: bool = False) -> nn.Module:
    """A network that every layout can hold, flattened after its global mean."""
    norm = nn.BatchNorm2d(8) if batch_norm else nn.GroupNorm(2, 8)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(16, 10),
    )
