"""One word for each part of a step, and the names that files have for them."""

from tutti.runs.step_parts import COMPUTE, SHARES, TIMED, StepPart


def test_files_keep_their_names() -> None:
    assert [part.key for part in TIMED] == ["data", "forward", "backward", "communication", "update"]
    assert [part.share_key for part in SHARES] == ["reading", "computing", "communication", "waiting", "rest"]
    assert [part.key for part in SHARES[3:]] == ["waiting", "rest"]


def test_parts_are_in_the_order_of_a_step() -> None:
    names = ("DATA", "FORWARD", "BACKWARD", "OPTIMIZER", "LOGGING", "VALIDATION", "CHECKPOINT")
    assert [StepPart[name].order for name in names] == list(range(7))
    assert set(COMPUTE) < set(TIMED)
