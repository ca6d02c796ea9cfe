"""The overhead of Horovod's API for TensorFlow and Keras on tutti's engine, compared with Gloo.

Claims, on 2 CPU ranks: a grouped all-reduce of 100 tensors of 1 MB in a tf.function takes at most 1.3 times as long as
one all-reduce of 100 MB by torch's Gloo. A step of Keras' `fit` with a model of 10 million parameters takes at most
1.25 times as long as a step in one process plus one Gloo all-reduce of the same size.

- grouped: `hvd.grouped_allreduce` of 100 tensors (op=Sum) in a tf.function that returns all of them.
- gloo: `torch.distributed.all_reduce` of one tensor of the same size, in the same processes.
- fit: three dense layers (10,082,570 parameters), SGD with momentum through `DistributedOptimizer`, data in memory.
- alone: the same `fit` with the plain optimizer in one process, while the other waits.
- concurrent: the same without a wrapper in both processes at once, which then also share the memory bandwidth.

Clock: time.perf_counter on rank 0, between barriers of all ranks, after warm-up, in processes that hold all contenders.
Contenders alternate; a ratio is the median of the ratios within each trial. A step of `fit` is the time from the start
of its first batch to the end of its last, divided by their number; what `fit` does before and after (it waits up to
seconds for threads of tf.data) is not counted. Each rank has one core and one thread for TensorFlow's operations.
"""

import argparse
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import torch.distributed as dist

from tutti.ranks.process import end_with_parent

BAR_MESSAGES, BAR_STEP = 1.3, 1.25
TENSORS, FLOATS = 100, 256 * 1024
WIDTHS, INPUTS, CLASSES = (2304, 2304, 1280), 784, 10
RANKS = 2

Work = Callable[[], Any]


def time_calls(work: Work, calls: int) -> float:
    """Seconds per call, between barriers."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    dist.barrier()
    return (time.perf_counter() - began) / calls


def between_barriers(step: Callable[[], float], takes_part: bool = True) -> float:
    """Runs a measurement between barriers; ranks that take no part wait for its end."""
    dist.barrier()
    found = step() if takes_part else 0.0
    dist.barrier()
    return found


def messages(hvd: Any, tf: Any) -> dict[str, Work]:
    pieces = [tf.ones([FLOATS]) for _ in range(TENSORS)]
    grouped = tf.function(lambda given: hvd.grouped_allreduce(given, op=hvd.Sum))
    whole = torch.ones(TENSORS * FLOATS)
    return {"grouped": lambda: grouped(pieces), "gloo": lambda: dist.all_reduce(whole)}


def fits(hvd_keras: Any, keras: Any, args: argparse.Namespace) -> tuple[dict[str, Callable[[], float]], int]:
    """Returns functions that time a step of `fit` with and without the wrapper, and the number of parameters."""

    class Clock(keras.callbacks.Callback):
        """Keras callback that records the start of the first batch and the end of the last."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ended = time.perf_counter()

    keras.utils.set_random_seed(args.seed)
    images = keras.random.normal([args.batch * args.steps, INPUTS])
    labels = keras.ops.cast(keras.random.uniform([args.batch * args.steps]) * CLASSES, "int32")
    made: dict[str, Callable[[], float]] = {}
    parameters = 0
    for name in ("fit", "plain"):
        layers = [keras.layers.Dense(width, activation="relu") for width in WIDTHS]
        model = keras.Sequential([keras.Input([INPUTS]), *layers, keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        if name == "fit":
            optimizer = hvd_keras.DistributedOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
        parameters = model.count_params()

        def step(model: Any = model) -> float:
            clock = Clock()
            model.fit(images, labels, batch_size=args.batch, shuffle=False, verbose=0, callbacks=[clock])
            return (clock.ended - clock.began) / args.steps

        made[name] = step
    return made, parameters


def run_as_rank(args: argparse.Namespace) -> None:
    """Runs all trials; rank 0 writes the results."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    end_with_parent()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= RANKS:
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    import keras
    import tensorflow as tf

    import tutti.horovod.keras as hvd_keras
    import tutti.horovod.tensorflow as hvd

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rank = hvd.rank()
    seconds: dict[str, list[float]] = {}

    def note(name: str, found: float) -> None:
        seconds.setdefault(name, []).append(found)
        if rank == 0:
            print(f"trial {len(seconds[name])}/{args.trials}  {name:<12} {found * 1e3:8.2f} ms")

    moved = messages(hvd, tf)
    for work in moved.values():
        time_calls(work, 5)
    for _, name in measure.alternating(tuple(moved), args.trials):
        note(name, time_calls(moved[name], args.calls))
    del moved
    made, parameters = fits(hvd_keras, keras, args)
    gradients = torch.ones(parameters)
    for step in (*made.values(), *made.values()):
        between_barriers(step)
    steps: dict[str, Callable[[], float]] = {
        "fit": lambda: between_barriers(made["fit"]),
        "alone": lambda: between_barriers(made["plain"], takes_part=rank == 0),
        "concurrent": lambda: between_barriers(made["plain"]),
        "all-reduce": lambda: time_calls(lambda: dist.all_reduce(gradients), args.steps),
    }
    for _, name in measure.alternating(tuple(steps), args.trials):
        note(name, steps[name]())
    if rank == 0:
        args.result.write_text(json.dumps({"seconds": seconds, "parameters": parameters}))
    hvd.shutdown()
    measure.leave_group()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow-cpu", "keras")}
    facts = measure.conditions(
        **versions, ranks=RANKS, batch=args.batch, trials=args.trials, steps=args.steps, calls=args.calls
    )
    measure.print_conditions(facts)
    with tempfile.TemporaryDirectory(prefix="hvd-tensorflow-") as folder:
        result = Path(folder) / "result.json"
        words = [f"--{key}={getattr(args, key)}" for key in ("batch", "steps", "calls", "trials", "seed")]
        command = measure.torchrun(RANKS, Path(folder), __file__, [*words, "--as-rank", f"--result={result}"])
        measure.run_command(command, Path.cwd(), args.deadline)
        measured = json.loads(result.read_text())
    seconds = measured["seconds"]
    sums = {
        name: [step + sent for step, sent in zip(seconds[name], seconds["all-reduce"], strict=True)]
        for name in ("alone", "concurrent")
    }
    ratios = {
        "grouped over gloo": measure.paired(seconds["grouped"], seconds["gloo"]),
        "fit over alone + all-reduce": measure.paired(seconds["fit"], sums["alone"]),
        "fit over concurrent + all-reduce": measure.paired(seconds["fit"], sums["concurrent"]),
    }
    bars = {
        f"100 x 1 MB at most {BAR_MESSAGES:g} of 100 MB": ratios["grouped over gloo"]["median"] <= BAR_MESSAGES,
        f"a step at most {BAR_STEP:g} of a step alone and an all-reduce": (
            ratios["fit over alone + all-reduce"]["median"] <= BAR_STEP
        ),
    }
    return {"program": "hvd_tensorflow", "conditions": facts, **measured, "ratios": ratios, "bars": bars}


def show(result: dict[str, Any]) -> None:
    print()
    rows = [[name, f"{measure.spread(found)['median'] * 1e3:.2f}"] for name, found in result["seconds"].items()]
    measure.print_table(["what", "ms"], rows)
    print()
    measure.print_table(
        ["ratio", "median", "min", "max"],
        [[name, *measure.shown(ratio, 3)] for name, ratio in result["ratios"].items()],
    )
    print(f"{result['parameters']:,} parameters")
    measure.print_verdict(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Horovod's API for TensorFlow and Keras on tutti's engine, compared with Gloo.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank in a step")
    parser.add_argument("--steps", type=int, default=20, help="steps of `fit` in a trial")
    parser.add_argument("--calls", type=int, default=10, help="all-reduces in a trial")
    parser.add_argument("--trials", type=int, default=7, help="trials of every contender")
    parser.add_argument("--seed", type=int, default=42, help="seed of weights and samples")
    parser.add_argument("--deadline", type=float, default=900, help="seconds that everything may take")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        run_as_rank(args)
        return
    measure.end_children_with_me()
    result = compare(args)
    show(result)
    measure.write_json(args.out, result)


if __name__ == "__main__":
    main()
