"""A large batch needs more epochs: the N-body U-Net at global batch 64 and 512 on one GPU, by gradient accumulation.

Claim: with the same 10 epochs (of 4,096 crops), global batch 512 ends at a higher validation loss than 64, because it
has an eighth of the steps. With four times the epochs, half the steps of 64, it reaches the same or a lower loss.

All runs have the same box, crops, micro-batches of 64, network and cosine decay. Batch 512 has a learning rate scaled
by the square root of 8 and a warm-up of 8 steps: the 128 of the full-size recipes, shortened like the epochs.

The program writes the validation losses after every epoch to a JSON file, and plots them against epochs and steps.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gpu_measure
import measure
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tutti.config.load import resolve
from tutti.data.nbody.make import make_nbody
from tutti.ranks.environments import discover
from tutti.train.run import run_rank
from tutti.train.torch import TorchFramework

RUNS = {
    "64, 10 epochs": ("nbody/bs64_opt", 10),
    "512, 10 epochs": ("nbody/bs512_test", 10),
    "512, 40 epochs": ("nbody/bs512_opt", 40),
}
COLOURS = {"64, 10 epochs": "#0072b2", "512, 10 epochs": "#d55e00", "512, 40 epochs": "#009e73"}


def train(name: str, args: argparse.Namespace, data: Path, folder: Path) -> dict[str, Any]:
    """Trains one run; returns its validation loss before the first step and after every epoch."""
    recipe, epochs = RUNS[name]
    overrides = [
        f"data.train={data / 'train.h5'}", f"data.valid={data / 'valid.h5'}", f"data.train_samples={args.samples}",
        f"data.valid_samples={args.valid_samples}", f"batch.micro={args.micro}", f"epochs={epochs}",
        f"seed={args.seed}", f"out={folder}", "checkpoint.every_epochs=null", *args.override,
    ]  # fmt: skip
    if not recipe.endswith("bs64_opt"):
        overrides.append(f"schedule.warmup_steps={args.warmup}")
    outcome = run_rank(TorchFramework(), resolve(recipe, overrides).config, discover({}))
    events = [json.loads(line) for line in outcome.folder.metrics.read_text().splitlines()]
    points = [event for event in events if event["event"] in ("start", "epoch")]
    return {
        "recipe": recipe,
        "overrides": [word for word in overrides if not word.startswith(("data.train=", "data.valid=", "out="))],
        "steps": [point["step"] for point in points],
        "epochs": [point["epoch"] for point in points],
        "valid_loss": [point["valid_loss"] for point in points],
        "samples_per_second": outcome.samples_per_second,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Plots the validation loss against epochs and against steps."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, key in zip(figure.subplots(1, 2, sharey=True), ("epochs", "steps"), strict=True):
        for name, run in result["runs"].items():
            label = f"global batch {name}: {run['valid_loss'][-1]:.4f}"
            axis.plot(run[key][1:], run["valid_loss"][1:], color=COLOURS[name], marker=".", label=label)
        axis.set_xlabel(key)
        axis.set_yscale("log")
        axis.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("validation loss (L1)")
    figure.axes[1].legend(fontsize=8)
    figure.suptitle(
        f"N-body to hydro: the same epochs are not enough for a large batch ({result['conditions']['device']})"
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The N-body U-Net at global batch 64 and 512 on one GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--box", type=int, default=512, help="cells on a side of the training box")
    parser.add_argument("--samples", type=int, default=4096, help="crops in an epoch")
    parser.add_argument("--valid-samples", type=int, default=512, help="crops of validation")
    parser.add_argument("--micro", type=int, default=64, help="crops in a forward pass")
    parser.add_argument("--warmup", type=int, default=8, help="warm-up steps of the large batch")
    parser.add_argument("--seed", type=int, default=1, help="seed of all runs")
    parser.add_argument("--data", type=Path, help="folder of train.h5 and valid.h5; made there if missing")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for all runs")
    parser.add_argument("--out", type=Path, default=Path("large_batch.json"), help="the record; a .png goes beside it")
    args = parser.parse_args()
    device = gpu_measure.find_gpu()
    facts = measure.conditions(device=gpu_measure.device_name(device), box=args.box, seed=args.seed, ranks=1, trials=1)
    with tempfile.TemporaryDirectory(prefix="large-batch-") as scratch:
        data = args.data or Path(scratch)
        for file, side, seed in (("train.h5", args.box, 1), ("valid.h5", args.box // 2, 2)):
            if not (data / file).exists():
                print(f"making {file}, {side}^3 cells", flush=True)
                make_nbody(data / file, box=side, seed=seed, memory_gib=16, device=device.type)
        runs = {name: train(name, args, data, Path(scratch) / "runs") for name in RUNS}
    last = {name: run["valid_loss"][-1] for name, run in runs.items()}
    small, large, long = (last[name] for name in RUNS)
    bars = {
        "512 is worse after the same epochs": large > small,
        "512 is as good or better with four times": long <= small,
    }
    result = {"program": "large_batch_nbody", "conditions": facts, "runs": runs, "bars": bars}
    draw(result, args.out.with_suffix(".png"))
    measure.write_json(args.out, result)
    print("; ".join(f"{name}: {loss:.5f}" for name, loss in last.items()))
    measure.print_verdict(bars)


if __name__ == "__main__":
    main()
