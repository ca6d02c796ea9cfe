"""What is concluded from where ranks are."""

from tutti.ranks.hub import Position, find_missing
from tutti.runs.step_parts import StepPart

HOSTS = ["n1", "n1", "n2", "n2"]


def at(rank: int, phase: StepPart, step: int, *stack: str) -> Position:
    return Position(rank, HOSTS[rank], phase, step, 30.0, stack)


def test_a_rank_in_an_earlier_phase_of_the_step_is_missing() -> None:
    answers = [at(rank, StepPart.BACKWARD, 12) for rank in (0, 1, 3)]
    answers.append(at(2, StepPart.DATA, 12, "read.py:3 in read: f()"))
    finding = find_missing(answers, HOSTS, "step 12 did not end within 30 s")
    assert (finding.arrived, finding.behind, finding.silent) == ((0, 1, 3), (2,), ())
    assert finding.text.splitlines() == [
        "step 12 did not end within 30 s: missing rank 2 on host n2.",
        "ranks 0-1, 3 arrived: in the backward pass, where gradients are averaged, of step 12 for 30 s",
        "rank 2 on host n2 is waiting for its batch of step 12 for 30 s:",
        "  | read.py:3 in read: f()",
    ]


def test_a_rank_in_an_earlier_step_is_missing_whatever_its_phase() -> None:
    answers = [
        at(0, StepPart.FORWARD, 13),
        at(1, StepPart.CHECKPOINT, 12),
        at(2, StepPart.FORWARD, 13),
        at(3, StepPart.FORWARD, 13),
    ]
    assert find_missing(answers, HOSTS, "x").behind == (1,)


def test_ranks_that_do_not_answer_are_named_with_their_hosts() -> None:
    finding = find_missing([at(0, StepPart.LOGGING, 5), at(1, StepPart.LOGGING, 5)], HOSTS, "the connection was lost")
    assert (finding.arrived, finding.silent) == ((0, 1), (2, 3))
    assert finding.text.startswith("the connection was lost: missing ranks 2-3 on host n2.\n")
    assert "no answer from rank 2 on host n2, 3 on host n2: the process or its host has ended" in finding.text


def test_where_nobody_is_behind_the_network_is_suspected() -> None:
    finding = find_missing([at(rank, StepPart.LOGGING, 5, "a.py:1 in a: b()") for rank in range(4)], HOSTS, "step 5")
    assert not finding.behind and not finding.silent
    assert "all ranks are at the same position and wait for each other" in finding.text
    assert "run tutti doctor" in finding.text and "a.py:1 in a: b()" in finding.text
