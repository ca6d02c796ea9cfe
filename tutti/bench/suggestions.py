"""Changes of a recipe for each bottleneck: overrides, the most promising first; computed without torch."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tutti import units
from tutti.bench.results import Measurement
from tutti.bench.shares import Shares, compiles, is_on
from tutti.bench.whatif import bucket_count, find_what_if, prefetch_depth
from tutti.runs.step_parts import StepPart

Change = Literal["precision", "batch"]
_MEBIBYTE = 1 << 20
_SOURCES = ("device", "memory")  # the fastest first
_BUCKETS = (100, 50, 10)
_SLOWED = 0.2  # slowdown of compute from which loader processes take too many cores


@dataclass(frozen=True)
class Suggestion:
    """Overrides to try, or advice where there is nothing to set; `changes` names what changes the trained model."""

    overrides: tuple[str, ...]
    why: str
    changes: Change | None = None

    @property
    def text(self) -> str:
        """The overrides, or the advice if there are none."""
        return " ".join(self.overrides) or self.why

    @property
    def line(self) -> str:
        """What to do and why, with a warning where the trained model changes."""
        if not self.overrides:
            return self.why
        warning = f" (changes the {self.changes}, and so the trained model)" if self.changes else ""
        return f"try {self.text}: {self.why}{warning}"


def suggest(measurement: Measurement, bound: str, shares: Shares) -> list[Suggestion]:
    """Suggestions for a bottleneck, without settings that the recipe has already."""
    if bound == "balanced":
        longest = [name_part(part) for part in find_what_if(measurement, shares).longest]
        first, second = (list(_RULES[name](measurement, shares)) for name in longest[:2])
        taken = [each for pair in zip(first, second, strict=False) for each in pair]
        return _different(taken + first[len(second) :] + second[len(first) :])
    return _different(_RULES[bound](measurement, shares) if bound in _RULES else ())


def name_part(part: StepPart) -> str:
    """The bottleneck that a part of a step is; time that no part covers is overhead of the host."""
    return "host" if part is StepPart.OTHER else part.value


def _different(found: Iterable[Suggestion]) -> list[Suggestion]:
    kept: dict[Any, Suggestion] = {}
    for each in found:
        kept.setdefault(each.overrides or each.why, each)
    return list(kept.values())


def _data_loading(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    data = _section(measurement, "data")
    present = data.get("source")
    for source in _SOURCES[: _SOURCES.index(present) if present in _SOURCES else None]:
        if source in measurement.sources and present not in ("auto", "synthetic"):  # auto has taken what fits
            yield Suggestion((f"data.source={source}",), f"samples come from {_PLACES[source]}")
    workers = data.get("workers") or 0
    if measurement.batches_are_samples:
        yield from _workers(measurement, shares, workers)
    yield from _prefetch(measurement, data)
    if measurement.batches_are_samples:
        yield from _fewer_workers(measurement, shares, workers)


_PLACES = {"device": "the GPU's own memory", "memory": "the host's memory instead of the disk"}


def _workers(measurement: Measurement, shares: Shares, present: int) -> Iterator[Suggestion]:
    """Numbers of loader processes: the first that hides data loading behind compute, then more, then fewer."""
    # More than cores, since processes that wait for the disk need none.
    most = max(4, 2 * measurement.cores // max(1, measurement.local_ranks))
    choices = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
    more = [workers for workers in choices if workers > present]
    alone = shares.alone.get("read")
    left = shares.whole.median - shares.path[StepPart.DATA].median
    needed = (
        (alone.median if alone else shares.path[StepPart.DATA].median) * max(1, present) / left if left > 0 else most
    )
    enough = [workers for workers in more if workers >= needed] or more[-1:]
    order = enough + [workers for workers in reversed(more) if workers not in enough]
    for workers in order:
        yield Suggestion(
            (f"data.workers={workers}",), f"{workers} loader processes on each rank load batches during the step"
        )


def _fewer_workers(measurement: Measurement, shares: Shares, present: int) -> Iterator[Suggestion]:
    if (shares.slowdown or 0) > _SLOWED:
        for workers in reversed([2**power for power in range(1, present.bit_length()) if 2**power < present]):
            yield Suggestion((f"data.workers={workers}",), f"{present} loader processes take cores from compute")


def _prefetch(measurement: Measurement, data: Mapping[str, Any]) -> Iterator[Suggestion]:
    if measurement.batches_are_samples and not data.get("workers"):
        return  # samples loaded in the rank's own process are not prefetched
    for depth in (2, 4):
        if depth > prefetch_depth(measurement):
            yield Suggestion((f"data.prefetch={depth}",), f"{depth} batches are prefetched")


def _compute(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    speed, model = _section(measurement, "speed"), _section(measurement, "model").get("name", "")
    own = ":" in model
    yield from _threads(measurement)
    yield from _bf16(measurement)
    if model != "mlp" and not is_on(measurement, speed.get("channels_last", "gpu")):
        yield Suggestion(("speed.channels_last=true",), "convolutions are faster in the channels-last memory format")
    if (own or model == "unet3d") and not is_on(measurement, speed.get("fold", "gpu")):
        yield Suggestion(("speed.fold=true",), "layers of few channels become matrix multiplications")
    yield from _compile(measurement)  # last: changes tried after it would be compiled too


def _compile(measurement: Measurement) -> Iterator[Suggestion]:
    """Compilation, and CUDA graphs on a GPU."""
    graphs = measurement.device == "cuda" and not is_on(measurement, _section(measurement, "speed").get("graphs"))
    if not compiles(measurement):
        yield Suggestion(("speed.compile=true",), "operators are fused, which reduces memory traffic")
        if graphs:
            yield Suggestion(("speed.compile=true", "speed.graphs=true"), "and kernels are launched as one CUDA graph")
    elif graphs:
        yield Suggestion(("speed.graphs=true",), "kernels are launched as one CUDA graph")


def _threads(measurement: Measurement) -> Iterator[Suggestion]:
    share = measurement.cores // max(1, measurement.local_ranks)
    if measurement.device == "cpu" and share > measurement.threads:
        idle = measurement.cores - measurement.threads * measurement.local_ranks
        yield Suggestion((f"runtime.threads={share}",), f"{idle} of {measurement.cores} cores are idle")


def _bf16(measurement: Measurement) -> Iterator[Suggestion]:
    if measurement.settings.get("precision", "fp32") == "fp32" and (measurement.device == "cuda" or cpu_has_bf16()):
        yield Suggestion(("precision=bf16",), "half the bytes, and faster matrix multiplications", "precision")


def cpu_has_bf16(path: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether the CPU has bf16 instructions."""
    try:
        return any(word in path.read_text() for word in ("avx512_bf16", "amx_bf16", " bf16"))
    except OSError:
        return False


def _communication(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    if measurement.stages:
        yield from _transfers(measurement)
        return
    ddp = _section(measurement, "ddp")
    if ddp.get("broadcast_buffers"):
        yield Suggestion(("ddp.broadcast_buffers=false",), "batch-norm statistics are not broadcast in every step")
    if not ddp.get("direct", True) and measurement.device == "cpu" and len(set(measurement.hosts)) <= 1:
        yield Suggestion(("ddp.direct=true",), "a small last bucket is averaged through shared memory")
    yield from _buckets(measurement)
    if ddp.get("find_unused_parameters"):
        yield Suggestion(("ddp.find_unused_parameters=false",), "the graph is not searched in every step")
    yield from _larger_batch(measurement)


def _buckets(measurement: Measurement) -> Iterator[Suggestion]:
    """Bucket sizes that change the number of buckets."""
    gradients_mb, counts = measurement.gradient_bytes / _MEBIBYTE, {bucket_count(measurement)}
    for size in _BUCKETS:
        count = max(1, math.ceil(gradients_mb / size))
        if count not in counts:
            counts.add(count)
            why = f"{gradients_mb:,.0f} MiB of gradients are averaged in {units.count(count, 'bucket')}"
            yield Suggestion((f"ddp.bucket_mb={size}",), why)


def _host(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    work = measurement.work
    if work and work.synchronises_at:
        lines = "; ".join(work.synchronises_at)
        yield Suggestion((), f"avoid synchronizing with the device in a step (.item() and the like): {lines}")
    yield from reversed(list(_compile(measurement)))  # launch overhead dominates here: graphs first
    micro = _section(measurement, "batch").get("micro")
    if micro and micro < measurement.per_rank_batch:
        whole = (f"batch.micro={measurement.per_rank_batch}",)
        yield Suggestion(whole, "the batch of a rank in one pass; this changes dropout and batch norm", "batch")
    yield from _larger_batch(measurement)


def _memory(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    yield from _bf16(measurement)
    yield from _compile(measurement)
    yield from _larger_batch(measurement)


def _straggler(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    host = measurement.hosts[shares.slowest] if shares.slowest < len(measurement.hosts) else "its host"
    yield Suggestion((), f"examine rank {shares.slowest} on {host}, for example with tutti doctor")
    fits = measurement.local_ranks <= measurement.cores
    if measurement.local_ranks > 1 and fits and _section(measurement, "runtime").get("binding", "none") == "none":
        yield Suggestion(("runtime.binding=compact",), "every rank has cores of its own")


def _imbalance(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    yield Suggestion((), "let stages() of the model name smaller modules, or use fewer stages")


def _transfers(measurement: Measurement) -> Iterator[Suggestion]:
    """Fewer and larger messages between stages."""
    stages, passes = len(measurement.stages), measurement.passes
    micro = measurement.per_rank_batch // passes
    if passes % 2 == 0 and passes // 2 >= stages:
        why = "half as many messages between stages; this changes dropout and batch norm"
        yield Suggestion((f"batch.micro={2 * micro}",), why, "batch")
    yield from _larger_batch(measurement)
    yield Suggestion((), "use fewer stages, on ranks that are connected by faster links")


def _bubble(measurement: Measurement, shares: Shares) -> Iterator[Suggestion]:
    stages, passes = len(measurement.stages), measurement.passes
    schedule = _section(measurement, "parallel").get("schedule")
    if schedule in ("gpipe", "1f1b") and passes % stages == 0:
        yield Suggestion(("parallel.schedule=interleaved",), "each rank has two smaller parts, and waits half as long")
    micro = measurement.per_rank_batch // passes
    if micro % 2 == 0:
        why = "twice as many micro-batches to wait for once; this changes dropout and batch norm"
        yield Suggestion((f"batch.micro={micro // 2}",), why, "batch")
    yield from _larger_batch(measurement)


def _larger_batch(measurement: Measurement) -> Iterator[Suggestion]:
    """Twice the batch, by the key that the recipe sets."""
    batch = _section(measurement, "batch")
    key = "per_rank" if batch.get("per_rank") else "global"
    size = batch.get(key) or measurement.global_batch
    overrides = [f"batch.{key}={2 * size}"]
    if batch.get("micro"):
        overrides.append(f"batch.micro={2 * batch['micro']}")
    rule = _section(measurement, "schedule").get("scaling", "none")
    rate = "the learning rate is not scaled" if rule == "none" else "the learning rate is scaled"
    yield Suggestion(tuple(overrides), f"half as many steps; {rate} (schedule.scaling={rule})", "batch")


def _section(measurement: Measurement, name: str) -> Mapping[str, Any]:
    return measurement.settings.get(name) or {}


_RULES: dict[str, Callable[[Measurement, Shares], Iterator[Suggestion]]] = {
    StepPart.DATA: _data_loading,
    StepPart.COMPUTE: _compute,
    StepPart.COMMUNICATION: _communication,
    "host": _host,
    "memory": _memory,
    StepPart.STRAGGLER: _straggler,
    "load imbalance": _imbalance,
    "bubble": _bubble,
}
