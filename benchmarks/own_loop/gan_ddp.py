"""What examples/gan.py does, with torch alone: torchrun --nproc-per-node 2 gan_ddp.py [--resume]."""

# pyright: reportMissingImports=false
import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gan import Ring, network

BATCH, SEED, EVERY_STEPS = 128, 42, 50
CHECKPOINT, METRICS = Path("gan_ddp.pt"), Path("gan_ddp.jsonl")


def save(step: int, sums: torch.Tensor, steps: int, kept: dict) -> None:
    """Write a checkpoint, whole or not at all, from rank 0; the sums of the log window are means over ranks."""
    mean = sums / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        aside = CHECKPOINT.with_suffix(".partial")
        state = {name: each.state_dict() for name, each in kept.items()}
        torch.save({"step": step, "sums": mean, "steps": steps, **state}, aside)
        with open(aside) as file:
            os.fsync(file.fileno())
        os.replace(aside, CHECKPOINT)
    dist.barrier()


def log(step: int, sums: torch.Tensor, steps: int) -> None:
    """Write the means of a log window over ranks, from rank 0."""
    dist.all_reduce(sums)
    if dist.get_rank() == 0:
        loss, critic = (sums / steps / dist.get_world_size()).tolist()
        with open(METRICS, "a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "critic": critic}) + "\n")
        print(f"step {step}  loss {loss:.4f}  critic {critic:.4f}", flush=True)


def forget_after(step: int) -> None:
    """Remove the metrics of steps that a resumed run makes again."""
    if dist.get_rank() == 0 and METRICS.exists():
        rows = [line for line in METRICS.read_text().splitlines() if json.loads(line)["step"] <= step]
        METRICS.write_text("".join(f"{row}\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks:
        raise SystemExit(f"a batch of {BATCH} does not split over {ranks} ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    stopped = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: stopped.append(received))

    torch.manual_seed(SEED)
    devices = [device] if device.type == "cuda" else None
    generator = DistributedDataParallel(network(4, 2).to(device), device_ids=devices)
    critic = DistributedDataParallel(network(2, 1).to(device), device_ids=devices)
    make = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judge = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    kept = {"generator": generator.module, "critic": critic.module, "make": make, "judge": judge}
    step, steps, sums = 0, 0, torch.zeros(2, dtype=torch.float64, device=device)
    if asked.resume:
        state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        step, steps = state["step"], state["steps"]
        if rank == 0:
            sums += state["sums"].to(device) * ranks
        for name, each in kept.items():
            each.load_state_dict(state[name])
    forget_after(step)

    data, share = Ring(), BATCH // ranks
    steps_per_epoch = len(data) // BATCH
    while step < asked.epochs * steps_per_epoch:
        epoch, index = divmod(step, steps_per_epoch)
        order = np.random.Generator(np.random.PCG64([SEED, epoch])).permutation(len(data))
        ids = order[index * BATCH + rank * share :][:share]
        real = torch.stack([data[int(number)][0] for number in ids]).to(device)
        draws = torch.Generator(device).manual_seed(SEED * 1_000_003 + step)
        noise = torch.randn(BATCH, 4, generator=draws, device=device)[rank * share :][:share]

        made = generator(noise)
        told = softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean()
        told.backward()
        judge.step()
        # Not through DDP, which would wait for gradients of the critic.
        fooled = softplus(-critic.module(made)).mean()
        fooled.backward()
        make.step()
        for optimizer in (make, judge):
            optimizer.zero_grad()

        sums += torch.stack([fooled.detach(), told.detach()])
        step, steps = step + 1, steps + 1
        if step % EVERY_STEPS == 0 or step % steps_per_epoch == 0:
            log(step, sums, steps)
            sums, steps = torch.zeros_like(sums), 0
        stop = torch.tensor([float(bool(stopped))], device=device)
        dist.all_reduce(stop)
        if stop.item() or step % steps_per_epoch == 0:
            save(step, sums, steps, kept)
        if stop.item():
            break
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
