"""Whether a recipe fits in the memory of a device, the largest micro-batch that does, and which key to set if not."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tutti.config.run import RunConfig
from tutti.errors import ConfigError
from tutti.memory.prediction import predict
from tutti.memory.rank import DATA, Prediction
from tutti.memory.samples import Samples, describe_samples
from tutti.memory.tracking import BATCH
from tutti.ranks.device import applies
from tutti.train.build import choose_prefetch

GIB = 1 << 30
Fit = Literal["fits", "may not fit", "does not fit"]
_LARGE_BATCH = 0.1  # of the peak, above which batches that are loaded ahead matter
_MORE_RANKS = (2, 4)  # that one rank may be replaced by, to split samples in space
_CUBES = {4: ("[2,2]",), 8: ("[2,2,2]",)}  # parts along several dimensions, where as many along the first do not fit
_MOST_CHECKS = 3  # predictions to find the largest micro-batch, after the two that give its slope


@dataclass(frozen=True)
class Margin:
    """What a process needs besides its tensors: a constant, and a part that grows with them; the least and the most."""

    least_bytes: int
    most_bytes: int
    most_factor: float


# Measured: torch's allocator reserves 7 to 40 % more on a GPU than tensors use, and 52 % where they use least; CUDA's
# context with its libraries takes 0.75 to 1.25 GiB. On a CPU, Python and torch take 0.2 to 0.35 GiB, allocator and
# oneDNN 13 to 29 %.
_MARGINS = {
    "cuda": Margin(least_bytes=GIB // 2, most_bytes=5 * GIB // 4, most_factor=1.45),
    "cpu": Margin(least_bytes=GIB // 5, most_bytes=7 * GIB // 20, most_factor=1.29),
}


def needed_bytes(prediction: Prediction) -> tuple[int, int]:
    """The least and the most that the process of a rank takes of a device."""
    margin = _MARGINS[prediction.device]
    peak = prediction.peak_bytes
    constant = prediction.kinds[DATA] if prediction.device == "cuda" else 0  # whole blocks of the allocator
    most = constant + math.ceil((peak - constant) * margin.most_factor) + margin.most_bytes
    return peak + margin.least_bytes, most


def judge_fit(prediction: Prediction, memory_bytes: int) -> Fit:
    """Whether a rank fits; only what surely does is said to fit."""
    least, most = needed_bytes(prediction)
    if most <= memory_bytes:
        return "fits"
    return "may not fit" if least <= memory_bytes else "does not fit"


@dataclass(frozen=True)
class Trial:
    """A recipe with some settings changed: its prediction and whether it fits, or why it cannot run."""

    settings: tuple[str, ...]  # overrides, and "-n 2" for another number of ranks
    prediction: Prediction | None = None
    verdict: Fit | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a rank, and what follows from the memory of its device, where that is known."""

    prediction: Prediction
    memory_bytes: int | None = None
    verdict: Fit | None = None
    largest_micro: int | None = None  # that fits; may be above the batch of a rank
    trials: tuple[Trial, ...] = ()  # where it does not surely fit


def make_memory_plan(
    resolve: Callable[[Sequence[str]], RunConfig],
    ranks: int,
    device: str,
    memory_bytes: int | None,
    memory_of: Callable[[int], int | None] | None = None,
) -> MemoryPlan:
    """Predict the memory of a rank, and look for settings that fit if these do not.

    `resolve` gives the recipe's configuration with more overrides; `memory_of` the memory of each rank where their
    number is another, which is the same without it.
    """
    config = resolve(())
    share = memory_of or (lambda _: memory_bytes)
    planner = _Planner(resolve, config, ranks, device, memory_bytes or 0, describe_samples(config), share)
    prediction = planner.predict(())
    if memory_bytes is None:
        return MemoryPlan(prediction)
    verdict = judge_fit(prediction, memory_bytes)
    largest = planner.find_micro(prediction)
    trials = () if verdict == "fits" else tuple(planner.trials(prediction, largest))
    return MemoryPlan(prediction, memory_bytes, verdict, largest, trials)


@dataclass(frozen=True)
class _Planner:
    resolve: Callable[[Sequence[str]], RunConfig]
    config: RunConfig
    ranks: int
    device: str
    memory_bytes: int
    samples: Samples
    memory_of: Callable[[int], int | None]

    def predict(self, settings: Sequence[str]) -> Prediction:
        return self._predict(settings, self.ranks, self.memory_bytes)

    def attempt(self, settings: Sequence[str], ranks: int | None = None) -> Trial:
        words = tuple(settings) if ranks is None else (f"-n {ranks}", *settings)
        memory = self.memory_bytes if ranks is None else self.memory_of(ranks) or 0
        try:
            prediction = self._predict(settings, ranks or self.ranks, memory)
        except ConfigError as error:
            return Trial(words, problem=str(error))
        return Trial(words, prediction, judge_fit(prediction, memory))

    def _predict(self, settings: Sequence[str], ranks: int, memory_bytes: int) -> Prediction:
        return predict(self.resolve(settings), ranks, self.device, self.samples, memory_bytes=memory_bytes or None)

    # The largest micro-batch.

    def find_micro(self, now: Prediction) -> int | None:
        """The largest micro-batch that fits: memory is affine in it, so two predictions give a guess to check."""
        other = None
        up, down = 2 * now.micro_batch, max(1, now.micro_batch // 2)
        for micro in (up, down) if judge_fit(now, self.memory_bytes) == "fits" else (down, up):
            other = other or self.attempt(_micro(micro, now)).prediction
        if other is None or other.peak_bytes == now.peak_bytes:
            return None
        most, rise = needed_bytes(now)[1], needed_bytes(other)[1] - needed_bytes(now)[1]
        slope = rise / (other.micro_batch - now.micro_batch)
        guess = math.floor(now.micro_batch + (self.memory_bytes - most) / slope)
        guess = min(guess, self.samples.count // self.ranks)  # a step needs that many
        for micro in _candidates(guess, now)[:_MOST_CHECKS]:
            if micro == now.micro_batch and judge_fit(now, self.memory_bytes) == "fits":
                return micro
            if self.attempt(_micro(micro, now)).fits:
                return micro
        return None

    # What to set.

    def trials(self, now: Prediction, largest_micro: int | None) -> Iterator[Trial]:
        """Each setting that saves memory alone, in the order of their cost; all together where none of them fits.

        Samples are split in space last, over as few ranks as suffice.
        """
        single: list[tuple[str, ...]] = []
        if largest_micro and largest_micro < now.micro_batch:
            single.append((f"batch.micro={largest_micro}",))
        single += [(each,) for each in self._settings(now)]
        found = [self.attempt(each) for each in single]
        split = self._split(now, ())
        found += [] if split is None else [split]
        yield from found
        if any(each.fits for each in found):
            return
        combined = () if now.micro_batch == 1 else ("batch.micro=1",)
        last = None
        for setting in self._settings(now):
            trial = self.attempt((*combined, setting))
            if trial.prediction is None:
                continue
            combined, last = trial.settings, trial
            if trial.fits:
                yield trial
                return
        last = self._split(now, combined) or last
        if last is not None and len(last.settings) > 1 and last not in found:
            yield last

    def _split(self, now: Prediction, others: Sequence[str]) -> Trial | None:
        """The trial of samples split in space, over all divisors of the ranks until one fits; None if none can run.

        The one rank of a run needs others for that.
        """
        parallel, last = self.config.parallel, None
        if parallel.space_parts != (1,) or parallel.stages > 1 or parallel.tensor > 1:
            return None
        counts = (
            _MORE_RANKS if self.ranks == 1 else [each for each in range(2, self.ranks + 1) if not self.ranks % each]
        )
        for count in counts:
            for parts in (str(count), *_CUBES.get(count, ())):
                # Ranks that share samples have those of all of them: the batch of a pass stays what it is.
                keeps = self.ranks > 1 and not any(each.startswith("batch.micro=") for each in others)
                micro = (f"batch.micro={now.micro_batch}",) if keeps and self.config.batch.micro is None else ()
                settings = (*others, *micro, f"parallel.space={parts}")
                trial = self.attempt(settings, count if self.ranks == 1 else None)
                if trial.fits:
                    return trial
                last = trial if trial.prediction is not None else last
        return last

    def _settings(self, now: Prediction) -> list[str]:
        """The settings that save memory and are not used yet, the cheapest first."""
        config, parallel = self.config, self.config.parallel
        settings = ["precision=bf16"] if config.precision == "fp32" else []
        if self.ranks > 1 and parallel.shard == "none":
            settings.append("parallel.shard=all")
        if parallel.recompute == "none":
            settings.append("parallel.recompute=layers")
        if config.model.name == "unet3d" and applies(config.speed.fold, torch.device(self.device)):
            settings.append("speed.fold=false")  # its matrices of windows are larger than the volumes
        if config.data.name == "nbody" and self.device == "cuda" and now.kinds[DATA]:
            settings.append("data.source=memory")
        if now.kinds[BATCH] > _LARGE_BATCH * now.peak_bytes and choose_prefetch(config, torch.device(self.device)):
            settings.append("data.prefetch=0")
        return settings


def _micro(micro: int, now: Prediction) -> tuple[str, ...]:
    """The settings of a micro-batch, with a larger batch of the rank where it has no such part."""
    fits_batch = micro <= now.per_rank_batch and now.per_rank_batch % micro == 0
    return (f"batch.micro={micro}",) if fits_batch else (f"batch.micro={micro}", f"batch.per_rank={micro}")


def _candidates(guess: int, now: Prediction) -> list[int]:
    """Micro-batches up to a guess, the largest first: parts of the batch of a rank, or multiples of it."""
    whole = now.per_rank_batch
    if guess >= whole:
        return [multiple * whole for multiple in range(guess // whole, 0, -1)]
    return [part for part in range(min(guess, whole), 0, -1) if whole % part == 0]


def expected_peak(prediction: Prediction) -> int:
    """What a rank will measure: the peak of its tensors on a GPU, that of its process on a CPU."""
    return prediction.peak_bytes if prediction.device == "cuda" else needed_bytes(prediction)[0]


def describe(plan: MemoryPlan, show: Callable[[float], str]) -> list[str]:
    """What to set, a line for each trial: "with batch.micro=8: 31.2 GiB, fits"."""
    lines = []
    for trial in plan.trials:
        settings = " ".join(trial.settings)
        if trial.prediction is None:
            lines.append(f"with {settings}: {trial.problem}")
        else:
            lines.append(f"with {settings}: {show(needed_bytes(trial.prediction)[1])}, {trial.verdict}")
    return lines
