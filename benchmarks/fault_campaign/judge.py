"""What is promised for each kind of fault, and whether a run kept it: pure functions over what was found."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fault_campaign.draw import LOCAL, NAMESPACES, SLURM, STEPS, Fault

ENDING, CAUSE, LEDGER, LEFT = "ending", "cause", "ledger", "nothing left"
QUESTIONS = (ENDING, CAUSE, LEDGER, LEFT)
_SAVED = 75
_LOST = (1, 76)
_GOES_ON = ("slow link", "lossy link", "clock jump")
_DISK = r"No space left|not permitted|cannot be written|Read-only|was not saved"
_GONE = r"No such file|no longer there|was removed|was deleted|is gone|cannot be written|was not saved"


@dataclass
class Found:
    """What a fault led to: how its run ended, what it said, and what came of the resume."""

    reached: bool = True  # whether the moment came at all
    hung: bool = False
    codes: list[int | None] = field(default_factory=list)  # of the first start, one for each process that a user has
    screen: str = ""
    record: dict[str, Any] | None = None  # after the first start
    latest: int | None = None  # the step of the newest checkpoint after the first start
    started_ranks: bool = True
    fault_step: int | None = None  # the step in which a rank made the fault itself
    resumes: list[dict[str, Any]] = field(default_factory=list)  # code, screen, state, latest, hung
    ledger: list[str] = field(default_factory=list)  # mistakes
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The answers to the four questions, each with the reason where it is no."""

    problems: dict[str, list[str]]

    @property
    def is_good(self) -> bool:
        return not any(self.problems.values())

    def answer(self, question: str) -> bool:
        return not self.problems[question]


def judge(fault: Fault, found: Found) -> Verdict:
    """Answer the four questions for one fault."""
    problems: dict[str, list[str]] = {question: [] for question in QUESTIONS}
    problems[ENDING] += _judge_ending(fault, found) + _judge_resumes(fault, found)
    problems[CAUSE] += _judge_cause(fault, found)
    problems[LEDGER] += found.ledger
    if fault.kind == "two resumes" and all(resume["trained"] for resume in found.resumes[:2]):
        problems[LEDGER].append("two starts have trained the same steps at once")
    problems[LEFT] += found.left
    return Verdict(problems)


def is_finished(found: Found) -> bool:
    """Return whether the first start has trained to the end, with its last checkpoint durable."""
    return (found.record or {}).get("state") == "finished" and found.latest == STEPS


def _judge_ending(fault: Fault, found: Found) -> list[str]:
    if found.hung:
        return ["hangs: did not end within its limit"]
    problems = [f"a traceback on the screen: {line}" for line in _tracebacks(found.screen)]
    state = (found.record or {}).get("state")
    if state == "finished" and found.latest != STEPS:
        problems.append(f"the record says finished, the newest checkpoint is of step {found.latest}")
    if fault.kind == "deleted folder" and not found.record and found.codes == [0] and fault.moment != "end":
        problems.append("exit code 0, and nothing is left of the run")
    problems += _judge_codes(fault, found)
    if state == "running" and _could_write(fault):
        problems.append("the record still says running, and the process that writes it could have told otherwise")
    return problems


def _judge_codes(fault: Fault, found: Found) -> list[str]:
    wanted = expected_codes(fault)
    if is_finished(found) and (fault.kind not in _MUST_FAIL or fault.moment == "end"):
        wanted = (*wanted, 0)
    if not found.reached:
        wanted = (0,)
    if fault.kind == "end of wall time" and not found.started_ranks:
        wanted = (*wanted, 143, 130, -15, -10, 1, 2)  # there was nothing to save
    wrong = [code for code in found.codes if code not in wanted]
    return [f"exit codes {found.codes}, expected {' or '.join(map(str, dict.fromkeys(wanted)))}"] if wrong else []


_MUST_FAIL = ("NaN loss", "out of memory", "code skew", "taken port")


def expected_codes(fault: Fault) -> tuple[int, ...]:
    """Return the exit codes that a fault may lead to, of any process that a user has started."""
    if fault.place == SLURM:
        return _slurm_codes(fault)
    kinds: dict[str, tuple[int, ...]] = {
        "kill rank": _LOST,
        "kill rank 0": _LOST,
        "kill launcher": (-9,),
        "kill fork server": (*_LOST, 2),
        "lose node": _LOST,
        "stop rank": _LOST,
        "cut link": (0,) if fault.way == "for 3 s" else (*_LOST, 2),
        "full disk": (0, 1, 2),
        "read-only folder": (0, 1, 2),
        "deleted folder": (0, 1, 2) if fault.moment == "end" else (1, 2),
        "end of wall time": (_SAVED,),
        "taken port": (1, 2),
        "out of memory": (1,),
        "NaN loss": (1,),
        "code skew": (2,),
        "SIGINT twice": (130, -2, _SAVED, 1),
    }
    codes = (0,) if fault.kind in _GOES_ON else kinds.get(fault.kind, (-9,))
    if fault.place == NAMESPACES and fault.kind == "out of memory":
        codes = _LOST  # ranks that lose another one before they are connected only know that it is gone
    if fault.place == NAMESPACES and fault.kind in ("kill rank", "kill rank 0", "lose node", "stop rank"):
        codes = (*codes, -9, 137)  # the process itself, which the campaign kills in the end where it was stopped
    return codes


def _slurm_codes(fault: Fault) -> tuple[int, ...]:
    """A job is requeued, and complete in the end; where a second start would fail too, it ends with the run's code."""
    if fault.kind in _MUST_FAIL:
        return (1, 2)
    if fault.kind == "end of wall time" and fault.way != "USR1":
        return (0, _SAVED, 1, 15, 143, -15)  # cancelled: it is not requeued
    return (0, *_LOST, _SAVED)  # the last ones where there was no progress since the last start


def _could_write(fault: Fault) -> bool:
    """Return whether a process was left that could have written the end of the run into its record."""
    if fault.kind in ("kill launcher", "two resumes", "truncated shard", "flipped shard", "torn metrics.jsonl"):
        return False
    if fault.kind in ("full disk", "read-only folder", "deleted folder"):
        return False
    if fault.place != LOCAL and (fault.kind == "kill rank 0" or fault.rank == 0):
        return False  # rank 0 keeps the record
    return not (fault.kind == "SIGINT twice" and fault.way == "at once")


def _judge_cause(fault: Fault, found: Found) -> list[str]:
    """Return what is wrong about the named cause and rank."""
    if found.hung:
        return ["hangs: nothing is named"]
    if not found.reached:
        return []
    says = expected_words(fault, found)
    problems = [f"not on the screen: {words}" for words in says if not re.search(words, found.screen, re.IGNORECASE)]
    record = found.record or {}
    wanted = expected_causes(fault)
    if wanted and record.get("state") == "failed":
        if record.get("cause") not in wanted:
            problems.append(f"the record's cause is {record.get('cause')}, expected {' or '.join(wanted)}")
        rank = record.get("failed_rank")
        if rank is not None and rank != fault.rank and fault.kind not in ("kill fork server", "cut link"):
            problems.append(f"the record names rank {rank}, it was rank {fault.rank}")
    return problems


def expected_words(fault: Fault, found: Found) -> list[str]:
    """Return what must be on the screen, as regular expressions."""
    rank = rf"\brank {fault.rank}\b"
    may_have_been_late = fault.moment == "end" or (fault.place == LOCAL and fault.kind == "end of wall time")
    if is_finished(found) and may_have_been_late:
        return []
    if fault.kind in ("end of wall time", "SIGINT twice") and not found.started_ranks:
        return []  # the shell tells of the signal
    words: dict[str, list[str]] = {
        "kill rank": [rank],
        "kill rank 0": [rank],
        "kill fork server": [r"error: \S+"],
        "lose node": [rank] if fault.place == NAMESPACES else [],
        "stop rank": [rank],
        "cut link": [] if fault.way == "for 3 s" else [r"\brank [01]\b"],
        "deleted folder": [_GONE],
        "end of wall time": [r"stopped|interrupted|cancelled|ended by"],
        "taken port": [r"port is in use"],
        "out of memory": [rank, r"memory"],
        "NaN loss": [rank, rf"loss is nan at step {found.fault_step}\b"],
        "code skew": [r"do not have the same code", rank],
        "SIGINT twice": [r"stopped|interrupted|nothing was saved|Ctrl-C|SIGINT"],
    }
    if fault.kind in ("full disk", "read-only folder") and found.latest != STEPS:
        return [_DISK]
    return words.get(fault.kind, [])


def expected_causes(fault: Fault) -> tuple[str, ...]:
    """Return the causes of which the record must have one, where the run has failed."""
    kinds: dict[str, tuple[str, ...]] = {
        "kill rank": ("rank_lost",),
        "kill rank 0": ("rank_lost",),
        "kill fork server": ("rank_lost", "launch"),
        "lose node": ("rank_lost",),
        "stop rank": ("rank_lost", "timeout"),
        "cut link": ("rank_lost", "timeout", "launch"),
        "out of memory": ("out_of_memory",),
        "NaN loss": ("diverged",),
        "code skew": ("launch",),
        "end of wall time": ("interrupted",),
    }
    return kinds.get(fault.kind, ())


def _judge_resumes(fault: Fault, found: Found) -> list[str]:
    """Return what is wrong about the starts that followed."""
    if fault.kind == "two resumes":
        return _judge_two(found.resumes)
    if fault.kind.endswith("shard"):
        return _judge_damaged(found.resumes)
    return [problem for number, resume in enumerate(found.resumes) for problem in _judge_resume(number + 1, resume)]


def _judge_resume(number: int, resume: dict[str, Any]) -> list[str]:
    if resume["hung"]:
        return [f"resume {number} hangs"]
    problems = [f"a traceback in resume {number}: {line}" for line in _tracebacks(resume["screen"])]
    if any(resume["codes"]):
        problems.append(f"resume {number} ended with exit codes {resume['codes']}: {_last_line(resume['screen'])}")
    elif resume["state"] != "finished" or resume["latest"] != STEPS:
        problems.append(f"resume {number} left state {resume['state']} and a checkpoint of step {resume['latest']}")
    return problems


def _judge_two(resumes: Sequence[dict[str, Any]]) -> list[str]:
    """Of two resumes at once one trains and one is refused; a third finds nothing left to do, or does the rest."""
    together, after = resumes[:2], resumes[2:]
    problems = [f"resume {number + 1} hangs" for number, each in enumerate(resumes) if each["hung"]]
    trained = [each for each in together if each["trained"]]
    if len(trained) != 1:
        problems.append(f"{len(trained)} of two resumes at once have trained; codes {[r['codes'] for r in together]}")
    elif sorted(code for each in together for code in each["codes"]) != [0, 2]:
        problems.append(f"two resumes at once ended with {[each['codes'] for each in together]}, expected 0 and 2")
    return problems + [problem for each in after for problem in _judge_resume(3, each)]


def _judge_damaged(resumes: Sequence[dict[str, Any]]) -> list[str]:
    """A damaged checkpoint is refused with its name and that of the last good one, from which the run then goes on."""
    refused, *after = resumes
    problems = []
    if refused["codes"] != [2] or not re.search(r"damaged", refused["screen"]):
        problems.append(f"a damaged checkpoint led to {refused['codes']}: {_last_line(refused['screen'])}")
    if not re.search(r"step-\d+.*step-\d+", refused["screen"], re.DOTALL):
        problems.append(f"the last good checkpoint is not named: {_last_line(refused['screen'])}")
    return problems + [problem for each in after for problem in _judge_resume(2, each)]


def _tracebacks(screen: str) -> list[str]:
    """Return the last line of each traceback that stands on the screen itself, not in the quoted lines of a log."""
    lines, found = screen.splitlines(), []
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            rest = [each for each in lines[number + 1 :] if each and not each.startswith(" ")]
            found.append(rest[0][:160] if rest else line)
    return found[:3]


def _last_line(screen: str) -> str:
    lines = [line for line in screen.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), lines[-1] if lines else "nothing said")[:200]
