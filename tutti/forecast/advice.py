"""Which number of ranks to ask for: the cheapest, the knee and the fastest, with what is uncertain about each.

Throughput and epochs are drawn from their posteriors; hours are epochs times samples over throughput, and node-hours
are hours times nodes. A weak study keeps the batch of a rank, so that the global batch grows with the ranks; a strong
study keeps the global batch. The knee has the least product of hours and cost: with perfect hardware that is where
the global batch equals the critical batch.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tutti import units
from tutti.errors import DataError
from tutti.forecast.batches import ChosenRate, MeasuredSweep, StudiedRecipe, choose_rate
from tutti.forecast.curve import ScalingCurve
from tutti.forecast.epochs import DRAWS, EpochsCurve, EpochsPoint, NoiseBelief, fit_epochs
from tutti.forecast.forecast import FittedCurve
from tutti.forecast.laws import Array

FARTHEST = 16  # times the measured nodes up to which a number of nodes is considered
MOST_NOISE = 2.0  # times the critical batch up to which a batch is considered
LEAST_EFFICIENCY = 0.5
UNITS = ("node-hours", "gpu-hours")
CHEAPEST, KNEE, FASTEST = "cheapest", "knee", "fastest"
_EQUAL = 0.02  # relative difference of costs or hours that does not count
_PROBABILITIES = (np.arange(200) + 0.5) / 200


@dataclass(frozen=True)
class Limits:
    """The limits of what may be advised."""

    budget: float | None = None
    unit: str = UNITS[0]
    deadline_hours: float | None = None
    efficiency: float = LEAST_EFFICIENCY
    most_nodes: int | None = None


@dataclass(frozen=True)
class Learning:
    """What is known about the epochs at a global batch."""

    given: EpochsPoint  # what the recipe takes, at the batch that it was written for
    curve: EpochsCurve | None = None
    sweep: MeasuredSweep | None = None
    belief: NoiseBelief | None = None  # from a measured noise scale

    @property
    def noise(self) -> float | None:
        """The critical batch."""
        return self.curve.noise_quantile(0.5) if self.curve else None

    def draws(self, global_batch: float) -> Array:
        """Passes over the data at a global batch: to the target of the sweep, else the recipe's at its own batch."""
        if self.curve is None:
            return np.full(DRAWS, float(self.given.epochs))
        if self.sweep is not None:
            return self.curve.draws(global_batch)
        growth = self.curve.log_law(global_batch) - self.curve.log_law(self.given.global_batch)
        return self.given.epochs * np.exp(growth)


@dataclass(frozen=True)
class RankOption:
    """A number of ranks with its global batch, and draws of what it takes."""

    ranks: int
    nodes: int
    global_batch: int
    samples_per_second: Array
    passes: Array  # over all training samples
    hours: Array
    efficiency: float
    epoch_share: float  # of the training samples that whole batches hold
    is_swept: bool = False  # measured by the sweep, with a batch of a rank that the study of ranks does not have

    @property
    def place(self) -> tuple[int, int]:
        """What it is known by."""
        return self.ranks, self.global_batch

    @property
    def epochs(self) -> Array:
        """Draws of epochs, each of which leaves out the samples that fill no batch."""
        return self.passes / self.epoch_share

    def cost(self, unit: str) -> Array:
        """Draws of what is charged."""
        return self.hours * (self.nodes if unit == UNITS[0] else self.ranks)


@dataclass(frozen=True)
class Choice:
    """An option that has a name, with its learning rate and its reasons."""

    name: str
    option: RankOption
    rate: ChosenRate
    epochs: int  # to plan for
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """The choices, and what kept more ranks out."""

    choices: tuple[Choice, ...]
    options: tuple[RankOption, ...]  # that were considered
    stopped: str | None  # why no more ranks were
    unmet: str | None = None  # where no option keeps the limits: which one is closest
    notes: tuple[str, ...] = ()

    def choice(self, name: str) -> Choice:
        return next(each for each in self.choices if each.name == name)


def learn(recipe: StudiedRecipe, sweep: MeasuredSweep | None, belief: NoiseBelief | None) -> Learning:
    """What a sweep and a noise scale say about epochs; with neither, the recipe's epochs are taken as they are."""
    given = EpochsPoint(recipe.global_batch, recipe.epochs * recipe.epoch_share(recipe.global_batch))
    if sweep is not None:
        return Learning(given, fit_epochs(sweep.points(), belief), sweep, belief)
    if belief is not None:
        return Learning(given, fit_epochs([given], belief), belief=belief)
    return Learning(given)


def advise(fitted: FittedCurve, recipe: StudiedRecipe, learning: Learning, limits: Limits) -> Advice:
    """The cheapest, the knee and the fastest of the numbers of ranks that keep the limits."""
    considered, stopped = _consider(fitted, recipe, learning, limits)
    considered += _swept(fitted, recipe, learning, {each.place for each in considered})
    fitting = [each for each in considered if _keeps(each, limits)]
    unmet = None if fitting else _closest(considered, limits)
    pool = fitting or considered
    named = _name(pool, limits.unit)
    choices = tuple(_choice(name, each, recipe, learning, limits) for name, each in named.items())
    cut = [each for each in considered if each.ranks > max(one.ranks for one in pool)]
    if fitting and cut and not _keeps(cut[0], limits):
        stopped = f"{_place(cut[0])} {_excess(cut[0], limits)}"
    return Advice(choices, tuple(considered), stopped, unmet, _notes(choices, recipe, learning))


def _name(pool: Sequence[RankOption], unit: str) -> dict[str, RankOption]:
    """The three choices; of options that cost as little, the fastest, and of those that are as fast, the cheapest."""
    costs = {each.place: _middle(each.cost(unit)) for each in pool}
    hours = {each.place: _middle(each.hours) for each in pool}
    cheap = [each for each in pool if costs[each.place] <= (1 + _EQUAL) * min(costs.values())]
    fast = [each for each in pool if hours[each.place] <= (1 + _EQUAL) * min(hours.values())]
    return {
        CHEAPEST: min(cheap, key=lambda each: hours[each.place]),
        KNEE: min(pool, key=lambda each: hours[each.place] * costs[each.place]),
        FASTEST: min(fast, key=lambda each: costs[each.place]),
    }


def interval(draws: Array) -> tuple[float, float, float]:
    """The median and the 90 % interval of draws."""
    low, middle, high = np.quantile(draws, (0.05, 0.5, 0.95))
    return float(middle), float(low), float(high)


def make_option(fitted: FittedCurve, recipe: StudiedRecipe, learning: Learning, ranks: int) -> RankOption:
    """What a number of ranks takes."""
    curve = fitted.curve
    batch = recipe.fixed_batch * (ranks if curve.mode == "weak" else 1)
    rates, passes = draw_rates(fitted, ranks), learning.draws(batch)
    hours = passes * recipe.train_samples / rates / 3600
    efficiency = curve.efficiency(ranks, _middle(rates))
    return RankOption(ranks, curve.nodes_for(ranks), batch, rates, passes, hours, efficiency, recipe.epoch_share(batch))


def _swept(
    fitted: FittedCurve, recipe: StudiedRecipe, learning: Learning, taken: Collection[tuple[int, int]]
) -> list[RankOption]:
    """Other batches on as many ranks as were measured, with the throughput that the sweep has measured there."""
    curve, found = fitted.curve, []
    measured = {each.ranks for each in curve.measurements}
    for each in learning.sweep.reached if learning.sweep and learning.sweep.has_speed_of(recipe) else ():
        ranks, speed, batch = each.ranks, each.samples_per_second, each.global_batch
        if ranks in measured and speed and (ranks, batch) not in taken:
            rates = speed * draw_rates(fitted, ranks) / _middle(draw_rates(fitted, ranks))
            passes = learning.draws(batch)
            hours = passes * recipe.train_samples / rates / 3600
            share, efficiency = recipe.epoch_share(batch), curve.efficiency(ranks, speed)
            place = (ranks, curve.nodes_for(ranks), batch)
            found.append(RankOption(*place, rates, passes, hours, efficiency, share, is_swept=True))
    return found


def draw_rates(fitted: FittedCurve, ranks: int) -> Array:
    """Draws of samples per second; those with one index are the same quantile on every number of ranks."""
    predicted = fitted.log_time(ranks)
    quantiles = [predicted.quantile(each) for each in _PROBABILITIES]
    places = np.random.default_rng(11).permutation((np.arange(DRAWS) + 0.5) / DRAWS)
    scale = fitted.curve.throughput(ranks, 0.0)
    return np.minimum(scale * np.exp(-np.interp(places, _PROBABILITIES, quantiles)), ranks * fitted.best_rate)


def known_nodes(fitted: FittedCurve) -> int:
    """The most nodes that were measured; two where one was, and the link is known."""
    return max(part[1].last_nodes for part in fitted.parts)


def numbers_of_ranks(fitted: FittedCurve, recipe: StudiedRecipe, most_nodes: int | None = None) -> list[int]:
    """The numbers of ranks to consider: measured ones of a single node, then full nodes up to a multiple of those."""
    curve = fitted.curve
    found = {each.ranks for each in curve.measurements if each.nodes == 1}
    if known_nodes(fitted) > 1:  # one node does not show the link
        limit = most_nodes or FARTHEST * known_nodes(fitted)
        powers = [2**power for power in range(math.ceil(math.log2(limit)) + 1)]
        nodes = {size for each in powers for size in (each, each + each // 2) if size <= limit}
        nodes |= {each.nodes for each in curve.measurements if each.nodes <= limit}
        found |= {each * curve.ranks_per_node for each in nodes}
    if curve.mode == "strong":
        found = {each for each in found if recipe.fixed_batch % (each * (recipe.micro_batch or 1)) == 0}
    kept = sorted(each for each in found if each >= curve.first.ranks)
    if not kept:
        fewest = units.count(curve.first.nodes, "node")
        raise DataError(f"--most-nodes {most_nodes}: expected {fewest} or more, the fewest that were measured.")
    return kept


def _consider(
    fitted: FittedCurve, recipe: StudiedRecipe, learning: Learning, limits: Limits
) -> tuple[list[RankOption], str | None]:
    """Options by rising ranks up to the first that is not worth its nodes, and why it is not."""
    found: list[RankOption] = []
    for ranks in numbers_of_ranks(fitted, recipe, limits.most_nodes):
        made = make_option(fitted, recipe, learning, ranks)
        if reason := _stop(made, fitted.curve, recipe, learning, limits):
            if found:
                return found, f"{_place(made)} or more: {reason}"
            if made.global_batch > recipe.train_samples:
                raise DataError(f"{_place(made)}: {reason}. Measure a smaller batch.")
        found.append(made)
    if known_nodes(fitted) == 1:
        return found, "more than one node: everything was measured on one, which does not show the link"
    if limits.most_nodes is not None:
        return found, f"more than {units.count(limits.most_nodes, 'node')}, as asked"
    most = units.count(FARTHEST * known_nodes(fitted), "node")
    return found, f"more than {most}, {FARTHEST} times the measured ones"


def _stop(
    made: RankOption, curve: ScalingCurve, recipe: StudiedRecipe, learning: Learning, limits: Limits
) -> str | None:
    """Why ranks are not added up to this number."""
    batch = units.count(made.global_batch)
    if made.global_batch > recipe.train_samples:
        return f"a global batch of {batch} is larger than the {units.count(recipe.train_samples)} training samples"
    if made.efficiency < limits.efficiency:
        return f"an expected efficiency of {units.percent(made.efficiency)}, below {units.percent(limits.efficiency)}"
    if curve.mode == "strong":
        return None  # the global batch does not grow
    if learning.curve is None:
        if made.ranks > curve.measurements[-1].ranks:
            return f"its global batch of {batch} is larger than any in the study, and may need any number of epochs"
        return None
    collapsed = learning.sweep.first_collapsed if learning.sweep else None
    if collapsed is not None and made.global_batch >= collapsed:
        return f"every run of the sweep collapses at a global batch of {units.count(collapsed)}"
    times = made.global_batch / learning.curve.noise_quantile(0.5)
    if times > MOST_NOISE:
        return f"its global batch of {batch} is {times:.1f} times the critical batch: more of it hardly saves steps"
    return None


def _keeps(each: RankOption, limits: Limits) -> bool:
    """Whether the limits are kept in the median."""
    cheap = limits.budget is None or _middle(each.cost(limits.unit)) <= limits.budget
    return cheap and (limits.deadline_hours is None or _middle(each.hours) <= limits.deadline_hours)


def _excess(each: RankOption, limits: Limits) -> str:
    """By how much an option misses the limits."""
    parts = []
    cost, hours = _middle(each.cost(limits.unit)), _middle(each.hours)
    if limits.budget is not None and cost > limits.budget:
        parts.append(f"{units.number(cost)} {limits.unit}, above the budget of {units.number(limits.budget)}")
    if limits.deadline_hours is not None and hours > limits.deadline_hours:
        parts.append(f"{show_hours(hours)}, above the deadline of {show_hours(limits.deadline_hours)}")
    return f"would take {' and '.join(parts)}"


def _closest(considered: Sequence[RankOption], limits: Limits) -> str:
    """Which option misses the limits by the least."""

    def factor(each: RankOption) -> float:
        cost = _middle(each.cost(limits.unit)) / limits.budget if limits.budget else 0.0
        return max(cost, _middle(each.hours) / limits.deadline_hours if limits.deadline_hours else 0.0)

    best = min(considered, key=factor)
    return f"Nothing keeps these limits. The closest is {_place(best)}, which {_excess(best, limits)}."


def _choice(name: str, each: RankOption, recipe: StudiedRecipe, learning: Learning, limits: Limits) -> Choice:
    # A run to a target ends when it is reached: it is planned for the upper end of the interval.
    planned = math.ceil(np.quantile(each.epochs, 0.95)) if learning.sweep else round(_middle(each.epochs))
    epochs = max(1, planned)
    rate = choose_rate(each.global_batch, epochs, recipe.rate, learning.noise, learning.sweep)
    return Choice(name, each, rate, epochs, tuple(_reasons(name, each, learning, limits, rate)))


def _reasons(name: str, each: RankOption, learning: Learning, limits: Limits, rate: ChosenRate) -> list[str]:
    why = {
        CHEAPEST: f"the fewest {limits.unit}",
        KNEE: f"the least product of hours and {limits.unit}",
        FASTEST: "the fewest hours",
    }
    found = [why[name], f"an efficiency of {units.percent(each.efficiency)}"]
    if each.is_swept:
        found[1] = f"{units.number(_middle(each.samples_per_second))} samples/s, measured by the sweep at this batch"
    if learning.noise is not None:
        found.append(f"a global batch of {each.global_batch / learning.noise:.2g} times the critical one")
    for limit, draws in ((limits.budget, each.cost(limits.unit)), (limits.deadline_hours, each.hours)):
        if limit is not None:
            what = "budget" if limit is limits.budget else "deadline"
            found.append(f"within the {what} with a probability of {units.percent(float(np.mean(draws <= limit)))}")
    return [*found, f"learning rate: {rate.reason}"]


def _notes(choices: Sequence[Choice], recipe: StudiedRecipe, learning: Learning) -> tuple[str, ...]:
    found = [note for each in choices for note in each.rate.notes]
    if learning.sweep and learning.sweep.recipe != recipe.name:
        found.insert(0, f"the sweep trained {learning.sweep.recipe}, and the study {recipe.name}")
    largest = max(each.option.global_batch for each in choices)
    if learning.sweep and largest > 2 * learning.sweep.largest_reached.global_batch:
        most = units.count(learning.sweep.largest_reached.global_batch)
        found.append(f"the sweep reaches its target up to a batch of {most}: beyond it epochs are extrapolated")
    return tuple(dict.fromkeys(found))


def show_hours(hours: float) -> str:
    """Hours as text, in the unit that suits them."""
    return units.duration(hours * 3600)


def _place(each: RankOption) -> str:
    return f"{units.count(each.ranks, 'rank')} on {units.count(each.nodes, 'node')}"


def _middle(draws: Array) -> float:
    return float(np.median(draws))
