"""The progress line of a run on terminals of several widths."""

import io
import re
import sys

import pytest

from tutti.runs.journal import Screen

STEP = {"event": "step", "epoch": 3, "step": 1050, "loss": 0.4374, "accuracy": 0.9375, "samples_per_second": 7343.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (40, "epoch 3/500 1,050/11,000 loss 0.4374 ac…"),
        (79, "epoch 3/500 1,050/11,000 loss 0.4374 accuracy 93.75% 7,343/s"),
        (120, "1,050/11,000 loss 0.4374 accuracy 93.75% 7,343/s"),
    ],
)
def test_epoch_and_step_are_in_sight_on_a_narrow_terminal(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    screen = Screen(total_steps=11_000, epochs=500, ranks=2)
    screen.write(STEP)
    screen.close()
    text = re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", terminal.getvalue())
    last = re.split(r"[\r\n]+", text.strip())[-1]
    assert last.startswith("epoch 3/500 ") and shown in last
