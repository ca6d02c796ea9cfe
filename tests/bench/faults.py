"""Recipes with a known fault of a known size, and without one, with the expected verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEALTHY = frozenset({"compute", "balanced", "unclear"})  # of a run that has no fault nothing else may be said
PARTS = "bench.fault_parts:"


@dataclass(frozen=True)
class Case:
    """A recipe and the words that are right for it."""

    name: str
    kind: str
    injected: str
    right: frozenset[str]
    recipe: Mapping[str, Any]
    ranks: int = 1
    rate: str | None = None  # of the links between hosts, one rank each; None: all ranks on this host
    trials: int = 5
    seconds: float = 2.0
    suggests: str | None = None  # an override that the verdict should offer


def data(name: str = "Numbers", **options: Any) -> dict[str, Any]:
    return {"name": PARTS + name, **options}


def layers(width: int = 512, depth: int = 1, **options: Any) -> dict[str, Any]:
    return {"name": PARTS + "Layers", "width": width, "depth": depth, **options}


def recipe(
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    per_rank: int = 64,
    loss: Mapping[str, Any] | None = None,
    optim: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The values of a recipe."""
    values = {
        "recipe": "fault",
        "data": dict(data),
        "model": dict(model),
        "optim": dict(optim or {"name": "sgd", "lr": 0.1}),
        "batch": {"per_rank": per_rank},
        "epochs": 1,
        "runtime": {"device": "cpu", "threads": 1},
        "log": {"tensorboard": False},
    }
    return values | ({"loss": dict(loss)} if loss else {}) | more


def only(*words: str) -> frozenset[str]:
    return frozenset(words)


def _reading() -> list[Case]:
    """Disks that are slow by themselves, decoding that costs arithmetic, too few loader processes."""
    cases = [
        Case(
            f"slow batches {milliseconds} ms, {ranks} rank{'s' if ranks > 1 else ''}",
            "slow reads",
            f"every batch waits {milliseconds} ms",
            only("data loading"),
            recipe(data("Sleeping", seconds=milliseconds / 1000), layers(256)),
            ranks=ranks,
        )
        for milliseconds, ranks in ((10, 1), (50, 1), (20, 2))
    ]
    cases += [
        Case(
            f"slow decoding x{steps}, {ranks} rank{'s' if ranks > 1 else ''}",
            "slow reads",
            f"a batch costs {steps} times the arithmetic of a step",
            only("data loading"),
            recipe(data("Decoding", width=512, depth=4, steps=steps), layers(512, 4), 128),
            ranks=ranks,
        )
        for steps, ranks in ((2, 1), (4, 1), (3, 2))
    ]
    cases.append(
        Case(
            "slow files, no loader process",
            "slow reads",
            "every sample waits 2 ms",
            only("data loading"),
            recipe(data("SleepingSamples", seconds=0.002), layers(256), 16),
            suggests="data.workers",
        )
    )
    return cases + [
        Case(
            f"{workers} loader process{'es' if workers > 1 else ''}",
            "too few loader workers",
            f"every sample waits {milliseconds} ms, loader processes: {workers}",
            only("data loading"),
            recipe(data("SleepingSamples", seconds=milliseconds / 1000, workers=workers), layers(256), 16),
            suggests="data.workers",
            seconds=3.0,
        )
        for workers, milliseconds in ((1, 2), (2, 5))
    ]


def _slow_ranks() -> list[Case]:
    return (
        [
            Case(
                f"rank 1 of {ranks} computes x{1 + extra}",
                "straggler",
                f"rank 1 does the arithmetic of {extra} more steps",
                only("straggler"),
                recipe(data(), layers(512, 4, slow_rank=1, extra_steps=extra), 256),
                ranks=ranks,
            )
            for ranks, extra in ((2, 2), (2, 4))
        ]
        + [
            Case(
                f"rank {rank} of {ranks} waits {milliseconds} ms in its step",
                "straggler",
                f"rank {rank} sleeps in its forward pass",
                only("straggler"),
                recipe(data(), layers(256, slow_rank=rank, sleeps=milliseconds / 1000), 32),
                ranks=ranks,
            )
            for ranks, rank, milliseconds in ((3, 2, 60), (4, 0, 80))
        ]
        + [
            Case(
                f"rank {rank} of {ranks} reads slowly, {milliseconds} ms",
                "straggler",
                f"batches of rank {rank} wait {milliseconds} ms",
                only("straggler"),
                recipe(data("Sleeping", seconds=milliseconds / 1000, on_rank=rank), layers(256), 32),
                ranks=ranks,
            )
            for ranks, rank, milliseconds in ((2, 1, 30), (4, 2, 80))
        ]
    )


def _networks() -> list[Case]:
    return [
        Case(
            f"{rate.removesuffix('mbit')} Mbit/s between hosts, {4 * width * width * depth / 1e6:.1f} MB",
            "slow network",
            "links of that rate, gradients of that size",
            only("communication"),
            recipe(data(), layers(width, depth), per_rank),
            ranks=2,
            rate=rate,
            trials=3,
            seconds=3.0,
        )
        for rate, width, depth, per_rank in (
            ("50mbit", 384, 1, 16),
            ("100mbit", 512, 1, 16),
            ("200mbit", 512, 2, 16),
            ("500mbit", 1024, 1, 16),
            ("500mbit", 512, 2, 256),
        )
    ]


def _hosts() -> list[Case]:
    """Steps that keep the host busy and the device idle."""
    looks = [
        Case(
            f".item() of {per_rank * 10 * times:,} numbers",
            ".item() in the step",
            "the loss reads every output in a Python loop",
            only("host"),
            recipe(data(), layers(128), per_rank, loss={"name": PARTS + "reads_numbers", "times": times}),
        )
        for per_rank, times in ((32, 1), (64, 2), (128, 4))
    ]
    looks.append(
        Case(
            "a loss by rows, 2 ranks",
            ".item() in the step",
            "the loss is computed row by row and reads each value",
            only("host"),
            recipe(data(), layers(128), 128, loss={"name": PARTS + "reads_rows"}),
            ranks=2,
        )
    )
    looks += [
        Case(
            f"the loss writes for {milliseconds} ms, {ranks} rank{'s' if ranks > 1 else ''}",
            "the host does something else",
            f"the loss waits {milliseconds} ms",
            only("host"),
            recipe(data(), layers(256), 32, loss={"name": PARTS + "waits", "seconds": milliseconds / 1000}),
            ranks=ranks,
        )
        for milliseconds, ranks in ((10, 1), (30, 2))
    ]
    return looks + [
        Case(
            f"{per_rank} sample{'s' if per_rank > 1 else ''} a step",
            "tiny per-rank batch",
            f"8 layers of {width}, Adam",
            only("host"),
            recipe(data(), layers(width, 8), per_rank, optim={"name": "adam", "lr": 1e-3}),
        )
        for per_rank, width in ((1, 64), (2, 64), (4, 32))
    ]


def _memory() -> list[Case]:
    return [
        Case(
            f"{4 * width * width * depth / 1e6:.0f} MB of weights, {per_rank} sample{'s' if per_rank > 1 else ''}",
            "oversized model",
            f"{optim['name']}; weights do not fit into any cache",
            only("memory"),
            recipe(data(features=256), layers(width, depth), per_rank, optim=optim),
        )
        for width, depth, per_rank, optim in (
            (4096, 1, 1, {"name": "sgd", "lr": 0.1}),
            (3072, 2, 4, {"name": "sgd", "lr": 0.1, "momentum": 0.9}),
            (4096, 1, 2, {"name": "adam", "lr": 1e-3}),
        )
    ] + [
        Case(
            "102 MB of table, 4 samples",
            "oversized model",
            "a step reads 256 rows, the optimizer updates all",
            only("memory"),
            recipe(data(), {"name": PARTS + "Table"}, 4, optim={"name": "sgd", "lr": 0.1, "momentum": 0.9}),
        )
    ]


def _healthy() -> list[Case]:
    return (
        [
            Case(
                f"healthy: {depth} layers of {width}, batch {per_rank}, {ranks} rank{'s' if ranks > 1 else ''}",
                "healthy",
                "nothing",
                HEALTHY,
                recipe(data(), layers(width, depth), per_rank),
                ranks=ranks,
            )
            for width, depth, per_rank, ranks in (
                (512, 4, 128, 1),
                (1024, 2, 256, 1),
                (512, 4, 256, 2),
                (1024, 2, 256, 2),
            )
        ]
        + [
            Case(
                f"healthy: convolutions, batch {per_rank}, {ranks} rank{'s' if ranks > 1 else ''}",
                "healthy",
                "nothing",
                HEALTHY,
                recipe(data(features=3072), {"name": PARTS + "Convolutions"}, per_rank),
                ranks=ranks,
            )
            for per_rank, ranks in ((32, 1), (32, 2))
        ]
        + [
            Case(
                "healthy: one .item() a step",
                "healthy",
                "one number is read in a step of much work",
                HEALTHY,
                recipe(data(), {**layers(512, 4), "name": PARTS + "ReadsOnce"}, 128),
            ),
            Case(
                "healthy: hosts at 1 Gbit/s",
                "healthy",
                "compute takes longer than communication",
                HEALTHY,
                recipe(data(), layers(256, 2), 1024),
                ranks=2,
                rate="1gbit",
                trials=3,
            ),
        ]
    )


def _balanced() -> list[Case]:
    return [
        Case(
            f"balanced: data loading x{steps:g} of compute, {ranks} rank{'s' if ranks > 1 else ''}",
            "balanced",
            f"a batch costs {steps:g} times the products of a step",
            HEALTHY,
            recipe(data("Decoding", width=512, depth=4, steps=steps), layers(512, 4), 128),
            ranks=ranks,
        )
        for steps, ranks in ((1, 1), (1.25, 1), (1, 2))
    ] + [
        Case(
            f"trials that disagree, {ranks} rank{'s' if ranks > 1 else ''}",
            "balanced",
            "a disk whose speed changes up to 64 times between trials",
            only("unclear"),
            recipe(data("Fickle", seconds=0.001), layers(512, 2), 64),
            ranks=ranks,
        )
        for ranks in (1, 2)
    ]


CASES = [*_reading(), *_slow_ranks(), *_networks(), *_hosts(), *_memory(), *_healthy(), *_balanced()]
