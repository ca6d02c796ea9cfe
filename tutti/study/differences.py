"""Whether the runs of two settings differ beyond the spread of their seeds, and how many seeds would show it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.units import is_share

MOST_SEEDS = 10  # the largest number of seeds that is suggested
_ERROR_RATE = 0.01  # of a conclusion: the probability that a difference is stated where there is none
_ASSUMED_DEVIATION = 0.25  # of seeds, on the logarithmic scale
_ASSUMED_FREEDOM = 2  # degrees of freedom that the assumption counts as
_LEAST_SHARE = 0.01  # added to shares of right and wrong answers: one wrong answer in hundred is no large factor
_ROUNDING = 1e-6  # the least standard deviation of seeds, relative to their mean: sums in single precision
_LEAST_OWN = 3  # seeds of each setting with which their own spread is enough


@dataclass(frozen=True)
class _Mean:
    """The mean over seeds with the variance of one seed and its degrees of freedom."""

    value: float
    variance: float
    freedom: float
    n: int


def difference(
    name: str, one: Sequence[float], other: Sequence[float], comparisons: int = 1, steps: bool = False
) -> int:
    """Returns 1 if `one` is larger than `other` beyond the spread of seeds, -1 if it is smaller, 0 if open.

    A difference is stated if one of two tests shows it, with half of the error rate each, divided by the number of
    comparisons: Welch's t test on the values, with three or more seeds of both settings; and a t test on a logarithmic
    scale in which a deviation of 0.25 counts as two runs more. `steps` leaves out the first: numbers of steps are
    rounded to epochs, so that equal ones do not show a spread of zero; neither do shares of a number of samples.
    """
    if not one or not other:
        return 0
    rate = _ERROR_RATE / 2 / comparisons
    pairs = [] if steps or _is_rounded(name, one, other) else [(_own(one), _own(other))]
    pairs.append((_assumed(name, one), _assumed(name, other)))
    for first, second in pairs:
        if first and second and _tail(first, second) < rate:
            return 1 if first.value > second.value else -1
    return 0


def seeds_needed(name: str, one: Sequence[float], other: Sequence[float], comparisons: int = 1) -> int | None:
    """Returns the number of seeds that would show the difference if means and spreads stay; None above MOST_SEEDS."""
    rate = _ERROR_RATE / 2 / comparisons
    pairs = [(_assumed(name, one), _assumed(name, other), 1)]
    if not _is_rounded(name, one, other):
        pairs.append((_own(one, least=2), _own(other, least=2), -1))
    for n in range(max(len(one), len(other), 1) + 1, MOST_SEEDS + 1):
        for first, second, extra in pairs:
            if first is None or second is None or (extra < 0 and n < _LEAST_OWN):
                continue
            later = [_Mean(each.value, each.variance, n + extra, n) for each in (first, second)]
            if _tail(*later) < rate:
                return n
    return None


def selected(settings: int) -> int:
    """The comparisons of the best of some settings with the others: all pairs, as any of them can be the best."""
    return settings * (settings - 1) // 2


def seeds_words(*samples: Sequence[float]) -> str:
    """The smallest number of seeds among settings, for a sentence: `one seed`, `3 seeds`."""
    least = min(map(len, samples))
    return "one seed" if least == 1 else f"{least} seeds"


def _is_rounded(name: str, *samples: Sequence[float]) -> bool:
    """Returns whether seeds of each setting have equal shares, which a few samples of validation give by chance."""
    return is_share(name) and all(min(values) == max(values) for values in samples)


def _own(values: Sequence[float], least: int = _LEAST_OWN) -> _Mean | None:
    """The mean with the spread of its seeds; None for too few of them."""
    if len(values) < least:
        return None
    mean = statistics.fmean(values)
    variance = max(statistics.variance(values), (_ROUNDING * mean) ** 2)
    return _Mean(mean, variance, len(values) - 1, len(values))


def _assumed(name: str, values: Sequence[float]) -> _Mean | None:
    """The mean on the logarithmic scale, with the assumed spread and that of its seeds; None for values up to 0."""
    if is_share(name) and all(0 <= value <= 1 for value in values):
        scaled = [math.log((value + _LEAST_SHARE) / (1 - value + _LEAST_SHARE)) for value in values]
    elif all(value > 0 for value in values):
        scaled = [math.log(value) for value in values]
    else:
        return None
    mean, freedom = statistics.fmean(scaled), _ASSUMED_FREEDOM + len(values) - 1
    squares = _ASSUMED_FREEDOM * _ASSUMED_DEVIATION**2 + sum((value - mean) ** 2 for value in scaled)
    return _Mean(mean, squares / freedom, freedom, len(values))


def _tail(one: _Mean, other: _Mean) -> float:
    """The two-sided probability of a difference as large as this one between equal settings, by Welch's t test."""
    away = abs(one.value - other.value)
    parts = [each.variance / each.n for each in (one, other)]
    if sum(parts) == 0:
        return 0.0 if away else 1.0
    shares = [part / sum(parts) for part in parts]
    freedom = 1 / sum(share**2 / each.freedom for share, each in zip(shares, (one, other), strict=True))
    return student_tail(away / math.sqrt(sum(parts)), freedom)


def student_tail(t: float, freedom: float) -> float:
    """Returns the probability that a variable of Student's t distribution is farther from 0 than t."""
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny, c, d = 1e-300, 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 300):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= d * c
        if abs(d * c - 1) < 1e-12:
            break
    return math.exp(logarithm) * fraction / a
