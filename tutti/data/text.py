"""Text without files: sentences of a small grammar, with agreement, nested clauses and sums, as characters."""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from tutti.data.order import Draws
from tutti.errors import DataError
from tutti.ranks.device import GOLDEN_GAMMA, mix, splitmix64

ALPHABET = "\n !,.?abcdefghijklmnopqrstuvwxyz"

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_SMALL = (*_ONES.split(), "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ADJECTIVES = ("old", "young", "small", "tall", "quiet", "clever", "tired", "happy", "brave", "slow")
_NOUNS = (
    ("dog", "dogs"),
    ("cat", "cats"),
    ("child", "children"),
    ("farmer", "farmers"),
    ("sailor", "sailors"),
    ("singer", "singers"),
    ("horse", "horses"),
    ("teacher", "teachers"),
    ("mouse", "mice"),
    ("king", "kings"),
    ("doctor", "doctors"),
    ("woman", "women"),
)
_ACTIONS = (
    ("sees", "see"),
    ("follows", "follow"),
    ("likes", "like"),
    ("helps", "help"),
    ("hears", "hear"),
    ("calls", "call"),
    ("chases", "chase"),
    ("fears", "fear"),
)
_STATES = (("sleeps", "sleep"), ("sings", "sing"), ("waits", "wait"), ("laughs", "laugh"), ("runs", "run"))
_PLACES = ("in the garden", "near the river", "on the hill", "under the tree", "behind the house", "by the sea")
_REPORTS = (("says", "say"), ("thinks", "think"), ("knows", "know"), ("hopes", "hope"))
_BLOCK = 1 << 14  # random numbers that are made at once
_Choice = TypeVar("_Choice")


class _Grammar:
    """Sentences from a stream of random numbers."""

    def __init__(self, seed: int) -> None:
        self._numbers = _random_numbers(seed)

    def sentence(self) -> str:
        """One sentence, with the space or the line break after it."""
        kinds = (self._statement, self._statement, self._report, self._equation, self._question)
        return self._one_of(kinds)() + ("\n" if self._below(4) == 0 else " ")

    def _below(self, end: int) -> int:
        return next(self._numbers) % end

    def _one_of(self, choices: Sequence[_Choice]) -> _Choice:
        return choices[self._below(len(choices))]

    def _statement(self) -> str:
        return self._clause(2) + ("!" if self._below(8) == 0 else ".")

    def _report(self) -> str:
        subject, number = self._noun_phrase(0)
        return f"{subject} {self._one_of(_REPORTS)[number]} that {self._clause(1)}."

    def _clause(self, depth: int) -> str:
        subject, number = self._noun_phrase(depth)
        if self._below(3) == 0:
            return f"{subject} {self._one_of(_STATES)[number]} {self._one_of(_PLACES)}"
        return f"{subject} {self._one_of(_ACTIONS)[number]} {self._noun_phrase(depth - 1)[0]}"

    def _noun_phrase(self, depth: int) -> tuple[str, int]:
        """A noun with its article, and whether the verb that belongs to it is singular (0) or plural (1)."""
        number = self._below(2)
        words = ["the" if number or self._below(2) else "every"]
        if self._below(2):
            words.append(self._one_of(_ADJECTIVES))
        words.append(self._one_of(_NOUNS)[number])
        if depth > 0 and self._below(3) == 0:
            words.append(self._relative(depth, number))
        return " ".join(words), number

    def _relative(self, depth: int, number: int) -> str:
        """A clause inside a noun phrase: its verb agrees with this noun, or with the one before the verb."""
        other, others_number = self._noun_phrase(depth - 1)
        if self._below(2):
            return f"that {self._one_of(_ACTIONS)[number]} {other}"
        return f"that {other} {self._one_of(_ACTIONS)[others_number]}"

    def _equation(self) -> str:
        first, second = self._below(50), self._below(50)
        if self._below(2):
            return f"{_in_words(first)} plus {_in_words(second)} is {_in_words(first + second)}."
        return f"{_in_words(first + second)} minus {_in_words(first)} is {_in_words(second)}."

    def _question(self) -> str:
        first, second = self._below(20), self._below(20)
        if self._below(2):
            return f"what is {_in_words(first)} plus {_in_words(second)}? it is {_in_words(first + second)}."
        order = "yes" if first > second else "no"
        return f"is {_in_words(first)} more than {_in_words(second)}? {order}, it is{'' if first > second else ' not'}."


def _random_numbers(seed: int) -> Iterator[int]:
    """Integers below 2^31 without end; the same seed gives the same ones."""
    for first in itertools.count(0, _BLOCK):
        states = np.arange(first, first + _BLOCK, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(mix(seed))
        yield from (splitmix64(states) >> np.uint64(33)).tolist()


def _in_words(number: int) -> str:
    """A number below 100 in words."""
    if number < len(_SMALL):
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f" {_SMALL[ones]}" if ones else "")


@lru_cache(maxsize=2)
def make_text(characters: int, seed: int = 0) -> str:
    """The first so many characters of the sentences that a seed gives."""
    grammar, made, length = _Grammar(seed), [], 0
    while length < characters:
        made.append(grammar.sentence())
        length += len(made[-1])
    return "".join(made)[:characters]


class TextWindows:
    """The windows of a text, one after another: the tokens of a window, and for each the one that follows it."""

    def __init__(self, tokens: torch.Tensor, context: int, vocabulary: int) -> None:
        self.input_shape = (context,)
        self.num_classes = vocabulary
        self._tokens = tokens
        self._places = torch.arange(context)
        if not len(self):
            raise DataError(
                f"a text of {len(tokens)} characters has no window of {context} and the character after it: expected "
                f"at least {context + 1}. Set data.context={max(1, len(tokens) - 1)} or less, or more data.characters."
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // len(self._places)

    def batch(self, ids: torch.Tensor, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
        places = ids[:, None] * len(self._places) + self._places
        return self._tokens[places], self._tokens[places + 1]


def text(split: str, context: int = 128, characters: int = 500_000, seed: int = 0) -> TextWindows:
    """Returns the windows of a generated text: its last tenth for validation, the rest for training."""
    whole = make_text(characters, seed)
    held_out = characters // 10
    part = whole[:-held_out] if split == "train" else whole[-held_out:]
    codes = np.full(128, -1, np.int64)
    codes[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))
    tokens = torch.from_numpy(codes[np.frombuffer(part.encode("ascii"), np.uint8)])
    return TextWindows(tokens, context, len(ALPHABET))
