"""Numbers as a reader wants them: few digits, a unit, and the interval in brackets.

Light: imports no torch.
"""

from tutti.bench.numbers import percent, show_seconds, three_digits
from tutti.study.efficiency import Estimate
from tutti.study.outcome import Summary


def percent_between(estimate: Estimate, digits: int = 0) -> str:
    """A share with its interval."""
    low, high = (f"{100 * each:.{digits}f}" for each in (estimate.low, estimate.high))
    return f"{percent(estimate.value, digits)} ({low} to {high} %)"


def times(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} times ({estimate.low:.2f} to {estimate.high:.2f})"


def duration(seconds: float) -> str:
    """A time in the unit in which it has few digits."""
    for least, scale, unit in ((3600, 3600, "h"), (120, 60, "min")):
        if abs(seconds) >= least:
            return f"{three_digits(seconds / scale)} {unit}"
    return show_seconds(seconds)


def metric_words(name: str) -> str:
    """valid_accuracy as validation accuracy."""
    return name.replace("valid_", "validation ").replace("train_", "training ").replace("_", " ")


def metric_number(name: str, value: float) -> str:
    """A share as a percentage, any other number with four digits."""
    return percent(value, 1) if name.endswith(("accuracy", "top5")) else f"{value:.4g}"


def metric_range(name: str, found: Summary) -> str:
    """The mean over seeds with the least and the largest."""
    if found.n == 1:
        return f"{metric_number(name, found.mean)} (1 run)"
    low, high = (metric_number(name, each).removesuffix(" %") for each in (found.low, found.high))
    unit = " %" if metric_number(name, found.low).endswith("%") else ""
    return f"{metric_number(name, found.mean)} ({low} to {high}{unit} in {found.n} runs)"


def speed(samples_per_second: float) -> str:
    """Whole samples a second, and parts of them where they are few."""
    return three_digits(samples_per_second, keep_zeros=True)


def count(value: float) -> str:
    """A number of things, with a comma at thousands."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"
