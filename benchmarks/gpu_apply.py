"""A whole box through the U-Net of six levels on one GPU: `tutti apply` in tiles against one pass.

Claims: tiles give what one pass over the box gives, also at the borders of tiles, to rounding: in fp32 within 1e-4 of
outputs between -1 and 1, and in the run's precision, bf16, by less than bf16 differs from fp32. A check without any
overlap shows that the borders of tiles would be seen.

A box of 512^3 is made (`tutti data make nbody`), and nbody/short_opt (117 M parameters) is trained on it for some
steps without compilation. Then `tutti apply RUN box.h5:Nbody --out FILE.h5` runs in a process of its own for each case:

- one pass, fp32 and bf16: --tile of the size of the box. Its memory is predicted from shapes first, and printed. Where
  it fails, or differs from tiles, a smaller part of the box takes its place: a tensor of the whole pass at 512^3 has
  2^31 elements, and kernels may count in 32 bits.
- tiles, fp32 and bf16: --tile 384, the smallest but one that six levels allow: eight tiles of which each border shows.
- default, bf16: the tiles that tutti chooses.
- no overlap, bf16: tiles of 256^3 beside each other.

fp32 is without TF32, whose rounding would hide what a border does. The file that each case has written is read back,
and compared with that of the pass of its precision: the largest difference of any output within --near cells of a
border between tiles, and further away.

Clock: time.perf_counter. "tiles" is from the plan of the tiles to the last one written: reading, computing and writing.
"whole" is the whole call: it also has the weights read and verified, the reach of a border found, and the file made
durable. The peak of the GPU is that of torch's allocator, of the host that of the process with the libraries of CUDA.
Reading the box and writing a file of the outputs' size are timed alone for comparison. The box is in the page cache.

    python benchmarks/gpu_apply.py --out gpu_apply.json
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_measure
import h5py
import measure
import numpy as np
import torch

from tutti.after import apply as applying
from tutti.after.run import open_run
from tutti.after.tiles import Tiles
from tutti.config.load import resolve
from tutti.data.nbody.make import make_nbody
from tutti.memory.prediction import predict_pass
from tutti.models.unet3d import UNet3d
from tutti.ranks.device import peak_memory
from tutti.ranks.environments import discover
from tutti.train.run import run_rank
from tutti.train.torch import TorchFramework

RECIPE = "nbody/short_opt"
BAR_FP32, BAR_SHOWN = 1e-4, 10
PRELOADED = [
    "__main__",
    "tutti.after.apply",
    "tutti.train.torch",
    "tutti.data.nbody.dataset",
    "tutti.memory.prediction",
]
DEADLINE_SECONDS = 300  # of a process
PLANES = 32  # that are read and compared at a time
TINY: dict[str, Any] = {"box": 64, "crop": 16, "depth": 3, "width": 4, "batch": 4, "steps": 40}
TINY |= {"tile": 56, "apart": 32, "near": 2}


@dataclass(frozen=True)
class Case:
    """One call of tutti apply."""

    name: str
    precision: str
    side: int  # of the part of the box
    tile: int | None = None
    overlap: int | None = None

    @property
    def file(self) -> str:
        return f"{self.name.replace(' ', '-').replace(',', '')}-{self.precision}-{self.side}.h5"


# In processes of their own.


def prepare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Makes the box and trains; returns the seconds of both and the run folder."""
    device, began = gpu_measure.find_gpu(), time.perf_counter()
    make_nbody(folder / "box.h5", box=args.box, seed=1, memory_gib=16, device=device.type)
    made = time.perf_counter()
    overrides = [
        f"data.train={folder / 'box.h5'}", f"data.valid={folder / 'box.h5'}", f"data.crop={args.crop}",
        f"data.train_samples={args.batch * args.steps}", f"data.valid_samples={args.batch}",
        f"model.width={args.width}", f"model.depth={args.depth}", f"batch.global={args.batch}", "epochs=1",
        "speed.compile=false", "log.to=[]", f"out={folder / 'runs'}", *args.override,
    ]  # fmt: skip
    outcome = run_rank(TorchFramework(), resolve(RECIPE, overrides).config, discover({}))
    return {
        "box_seconds": made - began,
        "training_seconds": time.perf_counter() - made,
        "results": outcome.results,
        "run": str(outcome.folder.path),
        "device": gpu_measure.device_name(device),
    }


def apply(case: Case, run_folder: str, inputs: str, folder: Path) -> dict[str, Any]:
    """Runs one case; returns its times, its peaks and where its tiles meet."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    run, plans = open_run(run_folder), list[Tiles]()
    run.config = resolve(str(run.folder.config), [f"precision={case.precision}"]).config
    plan_tiles, moments = applying.plan_tiles, dict[str, float]()

    def noted(*given: Any) -> Tiles:
        plans.append(plan_tiles(*given))
        moments["planned"] = time.perf_counter()
        return plans[-1]

    def report(done: int, total: int) -> None:
        moments["written"] = time.perf_counter()

    applying.plan_tiles = noted
    began = time.perf_counter()
    chosen = run.checkpoint("last")
    shape = applying.apply(run, chosen, inputs, folder / case.file, tile=case.tile, overlap=case.overlap, report=report)
    whole = time.perf_counter() - began
    windows = plans[-1].along(shape[1:])
    return {
        "note": plans[-1].note,
        "count": math.prod(map(len, windows)),
        "sizes": plans[-1].sizes,
        "seams": [[each.end for each in along[:-1]] for along in windows],
        "seconds": {"whole": whole, "tiles": moments["written"] - moments["planned"]},
        "cells_per_second": math.prod(shape[1:]) / whole,
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
        "host_gib": peak_memory(torch.device("cpu")) / 2**30,
        "bytes": (folder / case.file).stat().st_size,
        "shape": shape,
    }


def _work(function: Callable[..., dict[str, Any]], arguments: Sequence[Any], result: Path) -> None:
    with open(result.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    found = function(*arguments)
    aside = result.with_suffix(".part")
    aside.write_text(json.dumps(found))
    aside.replace(result)


def in_process(function: Callable[..., dict[str, Any]], *arguments: Any, result: Path) -> dict[str, Any]:
    """Calls a function in a process, whose GPU memory and whose failures are its own; or returns {"problem"}."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_work, args=(function, arguments, result))
    process.start()
    try:
        process.join(DEADLINE_SECONDS)
        if process.exitcode == 0 and result.exists():
            return json.loads(result.read_text())
        if process.is_alive():
            return {"problem": f"it did not end within {DEADLINE_SECONDS} s"}
        lines = result.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        return {"problem": lines[-1][:300] if lines else f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


# What was written.


def compare_files(ours: Path, theirs: Path, seams: Sequence[Sequence[int]], near: int) -> dict[str, float]:
    """Returns the largest differences of outputs near borders of tiles and elsewhere, and whether all are finite."""
    found = {"at_borders": 0.0, "elsewhere": 0.0, "finite": 1.0, "squares": 0.0}
    with h5py.File(ours) as one, h5py.File(theirs) as other:
        mine: Any = one["outputs"]
        yours: Any = other["outputs"]
        sides = mine.shape[1:]
        close = [_near(side, places, near) for side, places in zip(sides, seams, strict=True)]
        count = math.prod(mine.shape)
        for start in range(0, sides[0], PLANES):
            planes = slice(start, start + PLANES)
            first = torch.from_numpy(mine[:, planes])
            away = (first - torch.from_numpy(yours[:, planes])).abs()
            found["finite"] = min(found["finite"], float(away.isfinite().all()))
            found["squares"] += float(away.double().square().sum()) / count
            largest = away.amax(0)
            border = close[0][planes, None, None] | close[1][None, :, None] | close[2][None, None, :]
            for key, mask in (("at_borders", border), ("elsewhere", ~border)):
                found[key] = max(found[key], float(torch.where(mask, largest, 0.0).max()))
    found["root_mean_square"] = found.pop("squares") ** 0.5
    return found


def _near(side: int, places: Sequence[int], near: int) -> torch.Tensor:
    """Which cells along a side are within some cells of one of these places."""
    found = torch.zeros(side, dtype=torch.bool)
    for place in places:
        found[max(0, place - near) : place + near] = True
    return found


def time_files(box: Path, folder: Path) -> dict[str, float]:
    """Seconds to read the inputs, and to write a file of the size of the outputs, without computing."""
    with h5py.File(box) as file:
        fields: Any = file["Nbody"]
        side, began = fields.shape[1], time.perf_counter()
        for start in range(0, side, PLANES):
            fields[:, start : start + PLANES]
        read = time.perf_counter() - began
    values, began = np.ones((5, PLANES, side, side), np.float32), time.perf_counter()
    with h5py.File(folder / "alone.h5", "w") as file:
        outputs = file.create_dataset("outputs", (5, side, side, side), np.float32)
        for start in range(0, side, PLANES):
            outputs[:, start : start + PLANES] = values[:, : side - start]
    with open(folder / "alone.h5", "rb") as file:
        os.fsync(file.fileno())
    written = time.perf_counter() - began
    (folder / "alone.h5").unlink()
    return {"read": read, "write": written}


# The whole.


def predict_memory(args: argparse.Namespace, side: int, precision: str) -> dict[str, float]:
    """The memory of one pass over a box, from shapes; weights are 4 bytes each."""

    def make_model() -> UNet3d:
        return UNet3d(width=args.width, depth=args.depth)

    found = predict_pass(make_model, (1, 4, side, side, side), precision, "cuda", lays_out=True)
    return {"gib": found.peak_bytes / 2**30, "elements": found.most_elements}


def measure_all(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs all cases, writes what has ended after each one, and returns the result."""
    facts = measure.conditions(
        box=args.box, crop=args.crop, depth=args.depth, width=args.width, batch=args.batch, steps=args.steps, ranks=1,
        trials=1, near=args.near, tf32=False,
    )  # fmt: skip
    began = time.perf_counter()
    made = in_process(prepare, args, folder, result=folder / "prepare.json")
    if "problem" in made:
        sys.exit(f"error: the box or the training: {made['problem']}")
    facts["device"] = made["device"]
    print(
        f"{made['device']}: box of {args.box}^3 in {made['box_seconds']:.1f} s, {args.steps} steps in "
        f"{made['training_seconds']:.1f} s, validation loss {made['results']['valid_loss']:.4f}",
        flush=True,
    )
    result: dict[str, Any] = {"program": "gpu_apply", "conditions": facts, "prepared": made, "cases": [], "bars": {}}
    result["files_alone"] = time_files(folder / "box.h5", folder)
    smaller = [side for side in (args.box * 7 // 8, args.box // 2) if side % 2**args.depth == 0]
    for side in (args.box, *smaller):
        if not compare_at(side, args, folder, made["run"], result):
            break
        print(f"{side}^3: a smaller part of the box is tried")
    result["seconds"] = time.perf_counter() - began - made["box_seconds"]
    return result


def compare_at(side: int, args: argparse.Namespace, folder: Path, run: str, result: dict[str, Any]) -> str:
    """Runs the cases on a part of the box; returns what was wrong with one pass over it, or nothing."""
    inputs = cut_box(folder, side, args.box)
    for precision in ("fp32", "bf16"):
        expected = predict_memory(args, side, precision)
        result.setdefault("predicted", {})[f"{side}, {precision}"] = expected
        limit = ", 2^31 or more" if expected["elements"] >= 2**31 else ""
        print(
            f"one pass over {side}^3, {precision}: {expected['gib']:.1f} GiB predicted from shapes, largest tensor "
            f"{expected['elements']:,.0f} elements{limit}",
            flush=True,
        )
    passes = [Case("one pass", precision, side, tile=side) for precision in ("fp32", "bf16")]
    problem = ""
    for case in passes:
        found = run_case(case, args, folder, run, inputs, result, None)
        problem = problem or found.get("problem", "")
    compared = [Case("tiles", precision, side, tile=args.tile) for precision in ("fp32", "bf16")]
    if side == args.box:
        compared += [Case("default", "bf16", side), Case("no overlap", "bf16", side, tile=args.apart, overlap=0)]
    by_precision = {each.precision: each for each in passes}
    if side > args.tile:
        for case in compared:
            run_case(case, args, folder, run, inputs, result, by_precision[case.precision])
            (folder / case.file).unlink(missing_ok=True)
    if not problem:
        rounding = compare_files(folder / passes[1].file, folder / passes[0].file, [[], [], []], args.near)
        result["bf16_from_fp32"] = rounding
        problem = judge(side, result)
    for case in passes:
        (folder / case.file).unlink(missing_ok=True)
    measure.write_json(args.out, result)
    return problem


def cut_box(folder: Path, side: int, box: int) -> str:
    """Returns the inputs: the box, or a corner of it."""
    if side == box:
        return f"{folder / 'box.h5'}:Nbody"
    with h5py.File(folder / "box.h5") as file:
        fields: Any = file["Nbody"]
        np.save(folder / f"box-{side}.npy", fields[:, :side, :side, :side])
    return str(folder / f"box-{side}.npy")


def run_case(
    case: Case, args: argparse.Namespace, folder: Path, run: str, inputs: str, result: dict[str, Any], to: Case | None
) -> dict[str, Any]:
    """Runs a case and reads its file back; compares it with that of another one."""
    found = in_process(apply, case, run, inputs, folder, result=folder / f"{case.file}.json")
    if "problem" not in found:
        reference = to if to is not None and (folder / to.file).exists() else case
        found["difference"] = compare_files(folder / case.file, folder / reference.file, found["seams"], args.near)
        found["compared_with"] = reference.name if reference is not case else None
    found = asdict(case) | found
    result["cases"].append(found)
    measure.write_json(args.out, result)
    print(f"{case.side}^3 {case.name}, {case.precision}: {found.get('problem') or found['note']}", flush=True)
    return found


def judge(side: int, result: dict[str, Any]) -> str:
    """Notes which claims hold at a side; returns what is wrong with one pass over it, or nothing."""
    cases = {(each["name"], each["precision"]): each for each in result["cases"] if each["side"] == side}
    tiles = {precision: cases.get(("tiles", precision), {}) for precision in ("fp32", "bf16")}
    if any("difference" not in each for each in tiles.values()):
        return next(
            (each["problem"] for each in tiles.values() if "problem" in each), "the part is no larger than a tile"
        )
    most = {name: _largest(each) for name, each in tiles.items()}
    rounding = max(result["bf16_from_fp32"]["at_borders"], result["bf16_from_fp32"]["elsewhere"])
    bars = {
        f"{side}^3, fp32: tiles within {BAR_FP32:g} of one pass": most["fp32"] <= BAR_FP32,
        f"{side}^3, bf16: tiles differ by less than bf16 from fp32": most["bf16"] <= rounding,
        f"{side}^3: all outputs are finite": all(
            each["difference"]["finite"] == 1 for each in cases.values() if "difference" in each
        ),
    }
    apart = cases.get(("no overlap", "bf16"), {})
    if "difference" in apart:
        shown = apart["difference"]["at_borders"] >= BAR_SHOWN * most["fp32"]
        bars[f"without overlap borders show, {BAR_SHOWN} times as much or more"] = shown
    result["bars"] |= bars
    return "" if most["fp32"] <= BAR_FP32 else f"one pass differs from tiles by {most['fp32']:.2g}"


def _largest(case: dict[str, Any]) -> float:
    return max(case["difference"]["at_borders"], case["difference"]["elsewhere"])


def show(result: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    head = ["", "precision", "cells", "tiles", "tile", "whole, s", "tiles, s", "Mcells/s", "GPU GiB", "predicted"]
    head += ["host GiB", "at borders", "elsewhere"]
    rows = []
    for case in result["cases"]:
        cells = [case["name"], case["precision"], f"{case['side']}^3"]
        if "problem" in case:
            rows.append([*cells, *["-"] * 10])
            continue
        seconds, away = case["seconds"], case["difference"]
        expected = result["predicted"][f"{case['side']}, {case['precision']}"]["gib"]
        both = [f"{away[key]:.1e}" for key in ("at_borders", "elsewhere")] if case["compared_with"] else ["-", "-"]
        rows.append(
            [
                *cells, str(case["count"]), " x ".join(map(str, case["sizes"])), f"{seconds['whole']:.1f}",
                f"{seconds['tiles']:.1f}", f"{case['cells_per_second'] / 1e6:.1f}", f"{case['gpu_gib']:.1f}",
                f"{expected:.1f}" if case["name"] == "one pass" else "-", f"{case['host_gib']:.1f}", *both,
            ]
        )  # fmt: skip
    print()
    measure.print_table(head, rows)
    for case in result["cases"]:
        if "problem" in case:
            print(f"left out: {case['name']}, {case['precision']}, {case['side']}^3: {case['problem']}")
    if rounding := result.get("bf16_from_fp32"):
        most = max(rounding["at_borders"], rounding["elsewhere"])
        print(f"bf16 and fp32 in one pass differ by {most:.1e} at most, {rounding['root_mean_square']:.1e} in the mean")
    alone = result["files_alone"]
    print(
        f"alone: the box is read in {alone['read']:.1f} s, the outputs written in {alone['write']:.1f} s; everything "
        f"but the box took {result['seconds']:.0f} s. Peaks of the GPU have the weights; predictions do not."
    )
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A whole box through the U-Net by tutti apply: tiles against one pass.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--box", type=int, default=512, help="cells on a side of the box")
    parser.add_argument("--crop", type=int, default=64, help="cells on a side of a training crop")
    parser.add_argument("--depth", type=int, default=6, help="levels of the U-Net")
    parser.add_argument("--width", type=int, default=64, help="channels of its first layer")
    parser.add_argument("--batch", type=int, default=64, help="crops in a training step")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--tile", type=int, default=384, help="cells on a side of the tiles that are compared")
    parser.add_argument("--apart", type=int, default=256, help="of those without an overlap")
    parser.add_argument("--near", type=int, default=8, help="cells on each side of a border that count as at it")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for the training")
    parser.add_argument("--tiny", action="store_true", help="a small box and network, to try the program without a GPU")
    parser.add_argument("--keep", type=Path, help="a new or empty folder for box, run and outputs; default: temporary")
    parser.add_argument("--scratch", type=Path, help="folder for the temporary one, of 25 GB")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file, after every case")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    measure.end_children_with_me()
    with contextlib.ExitStack() as opened:
        if args.keep is None and args.scratch is not None:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gpu-apply-", dir=args.scratch)))
        else:
            folder = opened.enter_context(measure.kept_folder(args.keep, "gpu-apply-"))
        result = measure_all(args, folder)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
