"""What to say of the memory of a run: before it starts where it would not suffice, and after it did not."""

import functools
from dataclasses import dataclass

from tutti import units
from tutti.config.load import change
from tutti.config.run import RunConfig
from tutti.errors import Cause, TuttiError, cause_of
from tutti.memory.advice import MemoryPlan, describe, expected_peak, judge_fit, make_memory_plan, needed_bytes
from tutti.memory.estimate import choose_kind
from tutti.memory.prediction import predict
from tutti.train.memory import device_memory, memory_limit


@dataclass(frozen=True)
class Foresight:
    """The peak that a rank is expected to measure, and what to tell the user of it, if anything."""

    peak_bytes: int
    text: str = ""


def foresee(config: RunConfig, ranks: int, local_size: int) -> Foresight | None:
    """Predict the memory of a rank before the run; None where it cannot be predicted."""
    try:
        device = choose_kind(config)
        memory = device_memory(device, local_size)
        found = predict(config, ranks, device, local_size=local_size, memory_bytes=memory)
        peak = expected_peak(found)
        verdict = "fits" if memory is None else judge_fit(found, memory)
        if verdict == "does not fit":
            return Foresight(peak, f"warning: {_explain(_plan(config, ranks, local_size))}")
    except Exception as error:
        _tolerate(error)
        return None
    if memory is None or verdict == "fits":
        return Foresight(peak)
    least, most = map(units.size, needed_bytes(found))
    return Foresight(
        peak,
        f"warning: this may not fit: a rank needs {least} to {most} of memory, and has "
        f"{_name_memory(device, memory, local_size)}. Find out what to set with: tutti plan {config.recipe} -n {ranks}",
    )


def advise(config: RunConfig, ranks: int, local_size: int) -> Foresight | None:
    """What a rank needs of a run that has run out of memory, and what to set; None where it cannot be predicted."""
    try:
        plan = _plan(config, ranks, local_size)
    except Exception as error:
        _tolerate(error)
        return None
    return Foresight(expected_peak(plan.prediction), _explain(plan))


def _tolerate(error: Exception) -> None:
    """Let pass what a prediction may raise: its own refusals, and that no memory is left for it either."""
    if not isinstance(error, TuttiError) and cause_of(error) is not Cause.OUT_OF_MEMORY:
        raise error


def _plan(config: RunConfig, ranks: int, local_size: int) -> MemoryPlan:
    device = choose_kind(config)
    share = functools.partial(device_memory, device)
    return make_memory_plan(lambda more: change(config, more), ranks, device, share(local_size), share)


def _explain(plan: MemoryPlan) -> str:
    """What a rank needs and has, which key to set, and what each setting that was tried would need."""
    prediction, memory = plan.prediction, plan.memory_bytes
    least, most = map(units.size, needed_bytes(prediction))
    text = f"a rank needs {least} to {most} of memory"
    if memory is None:
        return f"{text}."
    text = f"{text}, and has {_name_memory(prediction.device, memory, prediction.ranks)}."
    if plan.verdict == "fits":
        fix = f"set batch.micro={prediction.micro_batch // 2}, or " if prediction.micro_batch > 1 else ""
        return f"{text} That should suffice: {fix}see what else uses the memory."
    fitting = next((trial for trial in plan.trials if trial.fits), None)
    fix = "No setting surely fits: choose a smaller model, smaller samples, or devices with more memory"
    if fitting is not None:
        words = " ".join(fitting.settings)
        fix = f"Start it with {words}" if words.startswith("-n") else f"Set {words}"
    return "\n  ".join([f"{text} {fix}.", *describe(plan, units.size)])


def _name_memory(device: str, memory: int, ranks: int) -> str:
    if device == "cuda":
        return f"{units.size(memory)} on its GPU"
    is_limit = memory_limit(ranks) == memory
    return f"{units.size(memory)}, {'to which it is limited' if is_limit else 'its share of this host'}"
