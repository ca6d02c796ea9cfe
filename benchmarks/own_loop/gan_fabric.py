"""What examples/gan.py does, with Lightning Fabric: fabric run --strategy ddp --devices 2 gan_fabric.py [--resume]."""

# pyright: reportMissingImports=false
import argparse
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, DistributedSampler

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gan import Ring, network

BATCH, SEED, EVERY_STEPS = 128, 42, 50
CHECKPOINT, METRICS = Path("gan_fabric.ckpt"), Path("gan_fabric.jsonl")


def save(fabric: Fabric, state: dict) -> None:
    """Write a checkpoint aside, and put it into the place of the last one."""
    aside = CHECKPOINT.with_suffix(".partial")
    fabric.save(aside, state)
    if fabric.is_global_zero:
        os.replace(aside, CHECKPOINT)
    fabric.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()

    fabric = Fabric()
    rank, ranks, device = fabric.global_rank, fabric.world_size, fabric.device
    if BATCH % ranks:
        raise SystemExit(f"a batch of {BATCH} does not split over {ranks} ranks")
    share, stopped = BATCH // ranks, []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: stopped.append(received))

    fabric.seed_everything(SEED)
    generator, critic = network(4, 2), network(2, 1)
    make = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judge = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, make = fabric.setup(generator, make)
    critic, judge = fabric.setup(critic, judge)
    # Not by setup_dataloaders, which counts epochs from the start of the program.
    sampler = DistributedSampler(data := Ring(), ranks, rank, seed=SEED)
    loader = DataLoader(data, batch_size=share, sampler=sampler, drop_last=True)
    state = {"generator": generator, "critic": critic, "make": make, "judge": judge, "step": 0, "steps": 0}
    state["sums"] = torch.zeros(2, dtype=torch.float64)
    if asked.resume:
        fabric.load(CHECKPOINT, state)
    if fabric.is_global_zero and METRICS.exists():
        rows = [line for line in METRICS.read_text().splitlines() if json.loads(line)["step"] <= state["step"]]
        METRICS.write_text("".join(f"{row}\n" for row in rows))

    steps_per_epoch = len(data) // BATCH
    first, skipped = divmod(state["step"], steps_per_epoch)
    for epoch in range(first, asked.epochs):
        sampler.set_epoch(epoch)
        for real, _ in itertools.islice(loader, skipped if epoch == first else 0, None):
            draws = torch.Generator(device).manual_seed(SEED * 1_000_003 + state["step"])
            noise = torch.randn(BATCH, 4, generator=draws, device=device)[rank * share :][:share]

            made, real = generator(noise), real.to(device)
            told = softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean()
            fabric.backward(told, model=critic)
            judge.step()
            # Not through DDP, which would wait for gradients of the critic.
            fooled = softplus(-critic.module(made)).mean()
            fabric.backward(fooled, model=generator)
            make.step()
            for optimizer in (make, judge):
                optimizer.zero_grad()

            values = fabric.all_reduce(torch.stack([fooled.detach(), told.detach()]).double(), reduce_op="mean")
            state["step"], state["steps"] = state["step"] + 1, state["steps"] + 1
            state["sums"] = state["sums"] + values.cpu()
            step, ends = state["step"], state["step"] % steps_per_epoch == 0
            if step % EVERY_STEPS == 0 or ends:
                loss, critics = (state["sums"] / state["steps"]).tolist()
                if fabric.is_global_zero:
                    with open(METRICS, "a") as file:
                        file.write(json.dumps({"step": step, "loss": loss, "critic": critics}) + "\n")
                fabric.print(f"step {step}  loss {loss:.4f}  critic {critics:.4f}")
                state["steps"], state["sums"] = 0, torch.zeros_like(state["sums"])
            stop = fabric.all_reduce(torch.tensor(float(bool(stopped)), device=device), reduce_op="sum").item()
            if stop or ends:
                save(fabric, state)
            if stop:
                return


if __name__ == "__main__":
    main()
