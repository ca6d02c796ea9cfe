"""What examples/gan.py does, with Accelerate: torchrun --nproc-per-node 2 gan_accelerate.py [--resume]."""

# pyright: reportMissingImports=false
import argparse
import json
import shutil
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gan import Ring, network

BATCH, SEED, EVERY_STEPS = 128, 42, 50
CHECKPOINT, METRICS = Path("gan_accelerate"), Path("gan_accelerate.jsonl")


class Progress:
    """The step, and the sums of the log window over all ranks, as Accelerate saves them."""

    def __init__(self) -> None:
        self.step, self.steps, self.sums = 0, 0, torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict:
        return {"step": self.step, "steps": self.steps, "sums": self.sums}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.steps, self.sums = state["step"], state["steps"], state["sums"]


def save(accelerator: Accelerator) -> None:
    """Write a checkpoint aside, and put it into the place of the last one."""
    aside = CHECKPOINT.with_suffix(".partial")
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(aside))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(CHECKPOINT, ignore_errors=True)
        aside.rename(CHECKPOINT)
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()

    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=SEED)
    accelerator = Accelerator(dataloader_config=loading)
    rank, ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    stopped = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: stopped.append(received))

    set_seed(SEED)
    generator, critic = network(4, 2), network(2, 1)
    make = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judge = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loader = DataLoader(Ring(), batch_size=BATCH, shuffle=True, drop_last=True)
    generator, critic, make, judge, loader = accelerator.prepare(generator, critic, make, judge, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if asked.resume:
        accelerator.load_state(str(CHECKPOINT))
    if accelerator.is_main_process and METRICS.exists():
        rows = [line for line in METRICS.read_text().splitlines() if json.loads(line)["step"] <= progress.step]
        METRICS.write_text("".join(f"{row}\n" for row in rows))

    steps_per_epoch, share = len(loader), BATCH // ranks
    first, skipped = divmod(progress.step, steps_per_epoch)
    for epoch in range(first, asked.epochs):
        loader.set_epoch(epoch)
        skip = skipped if epoch == first else 0
        for real, _ in accelerator.skip_first_batches(loader, skip) if skip else loader:
            draws = torch.Generator(device).manual_seed(SEED * 1_000_003 + progress.step)
            noise = torch.randn(BATCH, 4, generator=draws, device=device)[rank * share :][:share]

            made = generator(noise)
            told = softplus(-critic(real)).mean() + softplus(critic(made.detach())).mean()
            accelerator.backward(told)
            judge.step()
            # Not through DDP, which would wait for gradients of the critic.
            fooled = softplus(-accelerator.unwrap_model(critic)(made)).mean()
            accelerator.backward(fooled)
            make.step()
            for optimizer in (make, judge):
                optimizer.zero_grad()

            values = accelerator.reduce(torch.stack([fooled.detach(), told.detach()]).double(), "mean")
            progress.step, progress.steps, progress.sums = (
                progress.step + 1,
                progress.steps + 1,
                progress.sums + values.cpu(),
            )
            step, ends = progress.step, progress.step % steps_per_epoch == 0
            if step % EVERY_STEPS == 0 or ends:
                loss, critics = (progress.sums / progress.steps).tolist()
                if accelerator.is_main_process:
                    with open(METRICS, "a") as file:
                        file.write(json.dumps({"step": step, "loss": loss, "critic": critics}) + "\n")
                accelerator.print(f"step {step}  loss {loss:.4f}  critic {critics:.4f}")
                progress.steps, progress.sums = 0, torch.zeros_like(progress.sums)
            stop = accelerator.reduce(torch.tensor(float(bool(stopped)), device=device), "sum").item()
            if stop or ends:
                save(accelerator)
            if stop:
                return
    accelerator.end_training()


if __name__ == "__main__":
    main()
