"""Properties of the rounds of an elastic job, for any hosts that come, go and lose ranks."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tutti.launch.elastic.slots import CoolDown, RankLimits, Round, Rounds, SlotPool, usable_ranks

PAUSE_SECONDS = 10.0

repeatable = settings(max_examples=200, deadline=None, derandomize=True)


@repeatable
@given(st.integers(0, 100), st.integers(1, 100), st.integers(1, 500))
def test_the_ranks_that_are_used_are_the_most_over_which_the_batch_splits(present: int, most: int, parts: int) -> None:
    found = usable_ranks(present, most, parts)
    possible = [ranks for ranks in range(1, parts + 1) if ranks <= present and ranks <= most and parts % ranks == 0]
    assert found == max(possible, default=0)
    assert usable_ranks(present + 1, most, parts) >= found
    assert usable_ranks(present, most + 1, parts) >= found


@dataclass
class Offer:
    """What a host offers, as the test keeps count of it."""

    places: int
    order: int
    came: int
    losses: int = 0
    resting_until: list[float] = field(default_factory=list)

    def usable(self, now: float) -> int:
        return self.places - sum(end > now for end in self.resting_until)


class ElasticJob(RuleBasedStateMachine):
    """Hosts join, leave and lose ranks of the current round while time passes; every round is checked."""

    @initialize(
        min_ranks=st.sampled_from([1, 1, 2, 4]),
        more=st.integers(0, 10),
        parts=st.sampled_from([60, 24, 12, 8, 7]),
        losses_allowed=st.integers(0, 4),
        places=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    )
    def begin(self, min_ranks: int, more: int, parts: int, losses_allowed: int, places: list[int]) -> None:
        self.min_ranks, self.max_ranks, self.parts = min_ranks, min_ranks + more, parts
        self.losses_allowed = losses_allowed
        pool = SlotPool[int](CoolDown(PAUSE_SECONDS, failures_allowed=losses_allowed))
        self.rounds = Rounds(RankLimits(min_ranks, self.max_ranks, parts), pool)
        self.offers: dict[int, Offer] = {}
        self.now = 0.0
        self.hosts_so_far = 0
        self.current: Round | None = None
        self.running: dict[int, int] = {}  # ranks of the current round by their host
        self.formed = 0
        for number in places:
            self.host_joins(number, 0)
        self.round_is_formed()

    @rule(places=st.integers(0, 5), order=st.integers(0, 2))
    def host_joins(self, places: int, order: int) -> None:
        self.rounds.pool.add(self.hosts_so_far, f"host{self.hosts_so_far}", places, order)
        self.offers[self.hosts_so_far] = Offer(places, order, self.hosts_so_far)
        self.hosts_so_far += 1

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def host_leaves(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.offers)))
        self.rounds.pool.remove(host)
        del self.offers[host]
        self.running.pop(host, None)

    @precondition(lambda self: self.running)
    @rule(which=st.lists(st.integers(0, 9), min_size=1, max_size=3), seconds=st.sampled_from([0.0, 0.5, PAUSE_SECONDS]))
    def ranks_are_lost_and_a_round_is_formed_without_them(self, which: list[int], seconds: float) -> None:
        for number in which:
            if self.running:
                self._lose(sorted(self.running)[number % len(self.running)])
        self.now += seconds
        self.round_is_formed()

    def _lose(self, host: int) -> None:
        self.running[host] -= 1
        if not self.running[host]:
            del self.running[host]
        offer = self.offers[host]
        offer.losses += 1
        is_used_again = self.rounds.lose(host, self.now)
        assert is_used_again == (offer.losses <= self.losses_allowed)
        if is_used_again:
            offer.resting_until.append(self.now + PAUSE_SECONDS * 2 ** (offer.losses - 1))
        else:
            offer.places -= 1

    @rule(seconds=st.sampled_from([0.5, 5.0, PAUSE_SECONDS, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def time_passes_until_a_place_has_rested(self) -> None:
        change = self.rounds.pool.next_change(self.now)
        pending = [end for offer in self.offers.values() for end in offer.resting_until if end > self.now]
        assert change == min(pending, default=None)
        if change is not None:
            before = self.rounds.present(self.now)
            self.now = change
            assert self.rounds.present(self.now) > before

    @rule()
    def round_is_formed(self) -> None:
        usable = {host: offer.usable(self.now) for host, offer in self.offers.items()}
        sizes = [n for n in range(1, min(sum(usable.values()), self.max_ranks) + 1) if self.parts % n == 0]
        formed = self.rounds.next_round(self.now)
        if formed is None:
            assert max(sizes, default=0) < self.min_ranks
            return
        self.formed += 1
        assert formed.number == self.formed
        assert self.min_ranks <= formed.world_size <= self.max_ranks
        assert self.parts % formed.world_size == 0
        assert formed.world_size == max(sizes)
        assert formed.present == sum(usable.values()) and formed.spares == formed.present - formed.world_size >= 0
        assert all(0 < ranks <= usable[host] for host, ranks in formed.shares.items())
        self._check_ranks(formed, usable)
        assert not self.rounds.grows(formed, self.now)
        self.current, self.running = formed, dict(formed.shares)

    def _check_ranks(self, formed: Round, usable: dict[int, int]) -> None:
        """Ranks are numbered host after host, in the order of hosts; a host is left out only when there are enough."""
        expected = sorted(self.offers, key=lambda host: (self.offers[host].order, self.offers[host].came))
        assert list(formed.shares) == [host for host in expected if host in formed.shares]
        ranks = [rank for host in formed.shares for rank in formed.ranks_of(host)]
        assert ranks == list(range(formed.world_size))
        last = list(formed.shares)[-1]
        for host in expected[: expected.index(last)]:
            assert formed.shares.get(host, 0) == usable[host]
        assert all(not formed.ranks_of(host) for host in self.offers if host not in formed.shares)

    @invariant()
    def places_are_those_that_are_offered_and_do_not_rest(self) -> None:
        if hasattr(self, "offers"):
            usable = [offer.usable(self.now) for offer in self.offers.values()]
            assert all(places >= 0 for places in usable)
            assert self.rounds.present(self.now) == sum(usable)

    @invariant()
    def a_round_grows_when_a_larger_one_is_possible(self) -> None:
        if getattr(self, "current", None) is not None:
            most = min(self.rounds.present(self.now), self.max_ranks)
            larger = range(self.current.world_size + 1, most + 1)
            assert self.rounds.grows(self.current, self.now) == any(self.parts % ranks == 0 for ranks in larger)


class TestElasticJob(ElasticJob.TestCase):
    settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
