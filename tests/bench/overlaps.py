"""Recipes in which parts of a step overlap, so that shares of it mislead, with the expected verdicts."""

from bench.faults import PARTS, Case, data, layers, only, recipe

OVERLAPPING = "overlapping"  # begins the kinds of these cases
_COMPUTE_SECONDS = 0.024
_LINK = "200mbit"  # 24 MB/s of payload: 1.05 MB of gradients take 44 ms


def _reading_ahead() -> list[Case]:
    """Batches made during the step, in times of known ratios: neither waiting nor compute uses a core.

    Near 1 both parts take about as long: "balanced" is right, and so is the longer one.
    """
    rights = {
        0.7: only("compute"),
        0.9: only("compute", "balanced"),
        1.1: only("data loading", "balanced"),
        1.5: only("data loading"),
        2.0: only("data loading"),
    }
    per_rank, workers = 8, 2
    model = {"name": PARTS + "Accelerated", "seconds": _COMPUTE_SECONDS, "per_rank": per_rank}
    cases = []
    for ranks in (1, 2):
        for ratio, right in rights.items():
            batch, count = ratio * _COMPUTE_SECONDS, f"{ranks} rank{'s' if ranks > 1 else ''}"
            by = {
                "a thread": data("Sleeping", seconds=batch, prefetch=2),
                "processes": data("SleepingSamples", seconds=batch * workers / per_rank, workers=workers),
            }
            cases += [
                Case(
                    f"read ahead by {who} x{ratio:g}, {count}",
                    f"{OVERLAPPING} reads",
                    f"a batch takes {ratio:g} times as long as compute, and is made during the step",
                    right,
                    recipe(source, model, per_rank),
                    ranks=ranks,
                    suggests="data.workers" if who == "processes" and right == only("data loading") else None,
                )
                for who, source in by.items()
            ]
    return cases


def _decoding_ahead() -> list[Case]:
    """The same where both need cores, which they have or share; the part that needs more of them is right."""
    return [
        Case(
            f"decode ahead by a thread x{steps:g}, 1 rank",
            f"{OVERLAPPING} reads",
            f"a batch costs {steps:g} times the products of a step, during the step",
            only(right),
            recipe(data("Decoding", width=512, depth=4, steps=steps, prefetch=2), layers(512, 4), 128),
        )
        for steps, right in ((0.4, "compute"), (3, "data loading"))
    ] + [
        Case(
            f"decode ahead by a process x{steps:g}, 1 rank",
            f"{OVERLAPPING} reads",
            f"a batch costs {steps:g} times the products of a step, in another process",
            only(right),
            recipe(
                data("DecodingSamples", width=512, depth=4, steps=steps, per_rank=32, workers=1), layers(512, 4), 32
            ),
        )
        for steps, right in ((0.4, "compute"), (6, "data loading"))
    ]


def _exchanging_ahead() -> list[Case]:
    """Gradients in several buckets, averaged during a backward pass of known length."""
    return [
        Case(
            f"exchange x{ratio:g} of backward, {_LINK.removesuffix('mbit')} Mbit/s",
            f"{OVERLAPPING} communication",
            f"averaging takes about {ratio:g} times the backward pass, in 4 buckets",
            only(right),
            recipe(
                data(),
                {
                    "name": PARTS + "Accelerated",
                    "seconds": 1.5 * 0.044 / ratio,
                    "per_rank": 8,
                    "width": 256,
                    "depth": 4,
                },
                8,
                ddp={"bucket_mb": 0.25},
            ),
            ranks=2,
            rate=_LINK,
            trials=3,
            seconds=3.0,
        )
        for ratio, right in ((0.3, "compute"), (0.5, "compute"), (2.5, "communication"), (4, "communication"))
    ]


CASES = [*_reading_ahead(), *_decoding_ahead(), *_exchanging_ahead()]
