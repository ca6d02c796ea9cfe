"""Generated text: the same for a seed, true in what it says, and cut into windows that do not overlap."""

import hashlib
import re

import pytest
import torch

from tutti.data.text import _ACTIONS, _NOUNS, ALPHABET, TextWindows, _in_words, make_text, text
from tutti.errors import DataError

NUMBERS = {_in_words(number): number for number in range(100)}


def test_a_seed_gives_the_same_text_everywhere() -> None:
    found = make_text(100_000)
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == "198fb50ec6023609"
    assert found.startswith(make_text(1000))
    assert make_text(1000, seed=1) != make_text(1000)


def test_the_text_uses_the_alphabet_and_does_not_repeat_itself() -> None:
    found = make_text(500_000)
    assert set(found) <= set(ALPHABET)
    sentences = re.split(r"(?<=[.!])\s", found)
    statements = [each for each in sentences if each.startswith(("the", "every"))]
    assert len(set(statements)) > 0.9 * len(statements)


def test_sums_are_right() -> None:
    found = make_text(200_000)
    sums = re.findall(r"(?<=[.!]\s)([a-z ]+) (plus|minus) ([a-z ]+) is ([a-z ]+)\.", found)
    assert len(sums) > 500
    for first, sign, second, result in sums:
        assert NUMBERS[first] + (1 if sign == "plus" else -1) * NUMBERS[second] == NUMBERS[result]


def test_verbs_agree_with_their_nouns() -> None:
    number_of = {word: number for pair in _NOUNS for number, word in enumerate(pair)}
    verb_of = {word: number for pair in _ACTIONS for number, word in enumerate(pair)}
    pairs = re.findall(r"(?<=[.!]\s)(?:the|every) ([a-z]+) ([a-z]+) (?:the|every)", make_text(200_000))
    simple = [(noun, verb) for noun, verb in pairs if noun in number_of and verb in verb_of]
    assert len(simple) > 100
    assert all(number_of[noun] == verb_of[verb] for noun, verb in simple)


@pytest.mark.parametrize("context", [1, 16, 128])
def test_windows_predict_the_next_character_and_splits_are_disjoint(context: int) -> None:
    train, valid = (text(split, context=context, characters=5000) for split in ("train", "valid"))
    assert (train.input_shape, train.num_classes) == ((context,), 32)
    whole = ""
    for data in (train, valid):
        inputs, targets = data.batch(torch.arange(len(data)), None)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(inputs[1:, 0], targets[:-1, -1])
        part = "".join(ALPHABET[index] for index in inputs.flatten().tolist())
        assert part in make_text(5000)[len(whole) and 4500 :]
        whole += part
    assert len(train) == 4499 // context and len(valid) == 499 // context


def test_a_text_shorter_than_a_window_is_refused() -> None:
    message = r"a text of 5 characters has no window of 5 and the character after it: .* Set data\.context=4 or less"
    with pytest.raises(DataError, match=message):
        TextWindows(torch.zeros(5, dtype=torch.int64), 5, 32)
