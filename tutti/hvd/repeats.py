"""Rounds that come again in the same words on all ranks: they are granted as before, with nothing looked at."""

from tutti.hvd.messages import Message, Response

_MOST = 256


class Repeats:
    """Learns what was granted when every rank said the same numbers in one message, and knows it the next time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._grants: dict[tuple[int, ...], list[Response]] = {}
        self._kept: dict[
            int, tuple[Message, float]
        ] = {}  # what some ranks have said of a round that is known, and when
        self._round: list[Message] = []  # what has been said since nothing was waiting

    def keep(self, message: Message, now: float) -> bool:
        """Whether a message belongs to a known round; it is then kept here until all ranks have said the same."""
        begun = next(iter(self._kept.values()), None)
        known = message.known if begun is None else begun[0].known
        if message.requests or message.leaves or message.known != known or known not in self._grants:
            return False
        self._kept[message.rank] = message, now
        return True

    def complete(self) -> list[Response]:
        """What is granted when all ranks have said the same."""
        if len(self._kept) < self._size:
            return []
        known = next(iter(self._kept.values()))[0].known
        self._kept.clear()
        return self._grants[known]

    def give_up(self) -> list[tuple[Message, float]]:
        """Hand out what was kept: another rank says something else."""
        kept, self._kept = list(self._kept.values()), {}
        return kept

    def missing(self, waiting: set[int]) -> set[int]:
        """The ranks that have not said what these ranks have."""
        return set() if waiting.isdisjoint(self._kept) else set(range(self._size)).difference(self._kept)

    def since(self) -> float | None:
        """When the first of what is kept was said."""
        return min((when for _, when in self._kept.values()), default=None)

    def note(self, message: Message) -> None:
        """A message that goes the long way."""
        if len(self._round) <= self._size:
            self._round.append(message)

    def learn(self, granted: list[Response]) -> None:
        """Nothing is waiting any more: what was granted belongs to what was said, if all ranks said the same once."""
        heard, self._round = self._round, []
        words = {message.known for message in heard}
        if len(heard) != self._size or len({message.rank for message in heard}) != self._size or len(words) != 1:
            return
        known = words.pop()
        plain = not any(message.requests for message in heard)
        if known and plain and len(self._grants) < _MOST and not any(each.error or each.joined for each in granted):
            self._grants[known] = granted

    def forget(self) -> None:
        """Numbers have lost their meaning."""
        self._grants.clear()
