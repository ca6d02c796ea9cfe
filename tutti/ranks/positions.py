"""Positions of ranks within a step, and which rank the others wait for."""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti import units
from tutti.runs.step_parts import StepPart

_MAX_STACKS = 4
_STACK_DEPTH = 12  # calls of a stack
_TORCH_CALLS = ("_wrapped_call_impl", "_call_impl", "_run_ddp_forward")  # in every pass through a module


_NAMES = {
    StepPart.DATA: "waiting for its batch",
    StepPart.FORWARD: "in the forward pass",
    StepPart.BACKWARD: "in the backward pass, where gradients are averaged,",
    StepPart.OPTIMIZER: "in the optimizer",
    StepPart.LOGGING: "at the means of the log window",
    StepPart.VALIDATION: "in validation",
    StepPart.CHECKPOINT: "at the checkpoint",
}


@dataclass(frozen=True)
class Position:
    """What the main thread of a rank is doing, reported by another thread of that rank."""

    rank: int
    host: str
    phase: StepPart
    step: int  # the current step, counted from 1
    seconds: float  # since the phase began
    stack: tuple[str, ...]  # Python calls, innermost last

    @property
    def place(self) -> tuple[int, int]:
        """Progress, comparable between ranks."""
        return self.step, self.phase.order

    def plain(self) -> list[Any]:
        """Return what another rank cannot know of this one."""
        return [self.phase.value, self.step, self.seconds, list(self.stack)]

    @classmethod
    def from_plain(cls, rank: int, host: str, plain: list[Any]) -> "Position":
        """Return the position that a rank has sent."""
        phase, step, seconds, stack = plain
        return cls(rank, host, StepPart(phase), int(step), float(seconds), tuple(map(str, stack)))

    def sentence(self) -> str:
        return f"{_NAMES[self.phase]} of step {self.step:,} for {self.seconds:.0f} s"


@dataclass(frozen=True)
class HangFinding:
    """The result of a hang search."""

    text: str
    arrived: tuple[int, ...]
    behind: tuple[int, ...]  # ranks that answer, but have not reached the position of the others
    silent: tuple[int, ...]  # ranks that do not answer


def find_missing(answers: Sequence[Position], hosts: Sequence[str], what: str) -> HangFinding:
    """Find which ranks have arrived where the ranks wait, which are behind and where, and which do not answer."""
    here = sorted(answers, key=lambda each: each.rank)
    known = {each.rank for each in here}
    silent = tuple(rank for rank in range(len(hosts)) if rank not in known)
    furthest = max((each.place for each in here), default=(0, 0))
    arrived = [each for each in here if each.place == furthest]
    behind = [each for each in here if each.place != furthest]
    lines = [_headline(what, behind, silent, hosts)]
    if arrived:
        lines.append(f"{units.ranks([e.rank for e in arrived])} arrived: {arrived[0].sentence()}")
    for each in behind[:_MAX_STACKS]:
        lines += [f"rank {each.rank} on host {each.host} is {each.sentence()}:", *_quoted(each.stack)]
    if silent:
        shown = ", ".join(f"{rank} on host {hosts[rank]}" for rank in silent[:16])
        lines.append(f"no answer from rank {shown}: the process or its host has ended, is suspended, or is unreachable")
    if not behind and not silent:
        lines += [f"rank {arrived[0].rank} on host {arrived[0].host} waits with the stack:", *_quoted(arrived[0].stack)]
    return HangFinding(
        "\n".join(lines), tuple(each.rank for each in arrived), tuple(each.rank for each in behind), silent
    )


def stack_of(thread: int) -> tuple[str, ...]:
    """Return the Python calls of a thread as lines, innermost last."""
    frame = sys._current_frames().get(thread)
    calls = [call for call in traceback.extract_stack(frame) if call.name not in _TORCH_CALLS] if frame else []
    return tuple(
        f"{Path(call.filename).name}:{call.lineno} in {call.name}: {call.line or ''}" for call in calls[-_STACK_DEPTH:]
    )


def _headline(what: str, behind: Sequence[Position], silent: Sequence[int], hosts: Sequence[str]) -> str:
    missing = sorted({*(each.rank for each in behind), *silent})
    if not missing:
        return (
            f"{what}: all ranks are at the same position and wait for each other. "
            "The network between them may be down: run tutti doctor on the same hosts."
        )
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in missing[:16]))
    return f"{what}: missing {units.ranks(missing)} on host {where}."


def _quoted(stack: Sequence[str]) -> list[str]:
    return [f"  | {line}" for line in stack]
