"""An elastic training whose workers can be told to die, and its driver: `hvd_elastic_work.py drive|train FOLDER`."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hvd_jobs import in_a_job

import tutti.horovod.torch as hvd
from tutti.horovod import engine
from tutti.horovod.elastic import ADDED, ObjectState
from tutti.horovod.torch import elastic
from tutti.horovod.torch.elastic import ModelStateHandler, get_handler_registry, set_handler_registry

SAMPLES, PER_RANK_BATCH = 48, 4


# With a driver: what to do is in FOLDER/plan.json, what was done in FOLDER/worker-N.json.


def drive(folder: Path) -> int:
    """Be the driver of a job whose options are in the plan."""
    from tutti.horovod.run.arguments import ElasticOptions
    from tutti.horovod.run.driver import run_elastic
    from tutti.launch.hosts import parse_hosts

    options = json.loads((folder / "plan.json").read_text())["options"]
    if "hosts" in options:
        options["hosts"] = tuple(parse_hosts(options["hosts"]))
    if "cooldown_range" in options:
        options["cooldown_range"] = tuple(options["cooldown_range"])
    return run_elastic(ElasticOptions(**options), [sys.executable, __file__, "train", str(folder)])


def train(folder: Path) -> int:
    """Be a worker: two epochs, a commit after each batch, and what the plan has in store for it."""
    plan = json.loads((folder / "plan.json").read_text())
    worker = os.environ["TUTTI_ELASTIC_WORKER"]
    deeds = plan.get(worker, [])  # [epoch, batch, deed], in order
    sizes: list[tuple[int, ...]] = []
    position = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    expected = [int(os.environ[f"HOROVOD_{name}"]) for name in position]  # before hvd.init()
    if [-1, 0, "kill"] in deeds:
        os.kill(os.getpid(), signal.SIGKILL)
    if [-1, 1, "kill"] in deeds:  # where the others have met it, and wait for its connections
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    hvd.init()
    torch.manual_seed(int(worker))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), named)
    inputs = torch.linspace(-1, 1, 3 * SAMPLES).view(SAMPLES, 3)
    sampler = elastic.ElasticSampler(range(SAMPLES), seed=3)
    state = Counted(model, optimizer, sampler=sampler, epoch=0, batch=0, seen=[[], []])

    @elastic.run
    def run(state: Any) -> None:
        sizes.append((hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size(), state.epoch, state.batch))
        while state.epoch < 2:
            loader = torch.utils.data.DataLoader(range(SAMPLES), PER_RANK_BATCH, sampler=sampler)  # pyright: ignore
            for place, ids in enumerate(loader):
                do(deeds, state, folder)
                optimizer.zero_grad()
                loss = model(inputs[ids]).square().mean()
                loss.backward()
                optimizer.step()
                state.seen[state.epoch] += hvd.allgather(ids, name="ids").tolist()
                state.batch += 1
                sampler.record_batch(place, PER_RANK_BATCH)
                state.commit()
            state.epoch, state.batch = state.epoch + 1, 0
            sampler.set_epoch(state.epoch)
            state.commit()

    run(state)
    found = {"sizes": sizes, "seen": state.seen, "weights": weights(model), "syncs": Counted.syncs}
    found["expected"] = expected
    (folder / f"worker-{worker}.json").write_text(json.dumps(found))
    return 0


class Counted(elastic.TorchState):
    """Knows how often it was synchronised."""

    syncs = 0

    def sync(self) -> None:
        super().sync()
        Counted.syncs += 1


def do(deeds: list[list[Any]], state: Any, folder: Path) -> None:
    """What the plan says for this worker at this batch."""
    due = [deed for deed in deeds if deed[:2] == [state.epoch, state.batch]]
    for deed in due:
        deeds.remove(deed)
        what, *rest = deed[2:]
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hosts":  # the script's next words; go on when they have had their effect
            (folder / "hosts.new").write_text(rest[0])
            (folder / "hosts.new").replace(folder / "hosts")
    if due and due[0][2] in ("hosts", "wait"):
        size = hvd.size()
        while hvd.size() == size:
            state.check_host_updates()
            time.sleep(0.01)


# Without a driver, on the ranks of a plain launcher.


@in_a_job
def keep_state() -> dict[str, Any]:
    """What a state saves, restores and takes over from rank 0."""
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1 + rank)
    state = elastic.TorchState(model, optimizer, epoch=rank, history=[rank])
    found: dict[str, Any] = {"own": state.epoch}

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    state.sync()
    found["synced"] = [weights(model), optimizer.param_groups[0]["lr"], state.epoch, list(state.history)]
    step()
    state.history.append("lost")
    state.epoch = 7
    state.restore()
    found["restored"] = [weights(model), len(optimizer.state_dict()["state"]), state.epoch, list(state.history)]
    step()
    state.epoch = 8
    state.commit()
    before = weights(model)
    moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    step()
    state.restore()
    step()  # must not go on in the tensors that were saved
    state.restore()
    after = optimizer.state_dict()["state"][0]["exp_avg"]
    found["twice"] = weights(model) == before and torch.equal(after, moments) and state.epoch == 8
    state.model = torch.nn.Linear(1, 1)  # a new value is saved at once
    kept = weights(state.model)
    with torch.no_grad():
        state.model.weight.zero_()
    state.restore()
    found["assigned"] = weights(state.model) == kept
    return found


@in_a_job
def handle_otherwise() -> list[str]:
    """Values of a kind with a handler of the user's."""
    calls: list[str] = []

    class Handler(ModelStateHandler):
        def sync(self) -> None:
            calls.append("sync")

    registry = get_handler_registry()
    set_handler_registry([(torch.nn.Linear, Handler), *registry])
    try:
        elastic.TorchState(model=torch.nn.Linear(1, 1)).sync()
    finally:
        set_handler_registry(registry)
    elastic.TorchState(model=torch.nn.Linear(1, 1)).sync()
    return calls


@in_a_job
def interrupt_together() -> list[Any]:
    """Rank 0 alone has heard of new hosts; then of nothing."""
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=1)
    if hvd.rank() == 0:
        state.on_hosts_updated(0.0, ADDED)
    found: list[Any] = []
    try:
        state.commit()
    except hvd.HostsUpdatedInterrupt as interrupt:
        found.append(interrupt.skip_sync)
    state.commit()
    return found


def heal_a_mismatch() -> list[Any]:
    """An operation that fails once on all ranks: back to the last commit, and on."""
    hvd.init()
    state = elastic.TorchState(step=0, tries=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    broken = [True]

    @elastic.run
    def run(state: Any) -> int:
        while state.step < 4:
            state.step += 1
            rows = 1 + hvd.rank() if state.step == 3 and broken and broken.pop() else 1
            hvd.allreduce(torch.ones(rows), name="x")
            state.commit()
        return state.step

    found = [run(state), resets]
    hvd.barrier()
    hvd.shutdown()
    return found


def fail_for_good(how: str) -> str:
    """An error that comes again after each reset, or a rank that nobody replaces."""
    hvd.init()

    @elastic.run
    def run(state: Any) -> None:
        hvd.allreduce(torch.ones(1), name="fine")
        if how == "kill" and hvd.rank() == 1:
            engine.execute = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        rows = 1 if how == "kill" else 1 + hvd.rank()
        hvd.allreduce(torch.ones(rows), name="x")

    try:
        run(elastic.TorchState(step=0))
    except hvd.HorovodInternalError as error:
        return str(error)
    return "no error"


def weights(model: torch.nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


if __name__ == "__main__":
    sys.exit({"drive": drive, "train": train}[sys.argv[1]](Path(sys.argv[2])))
