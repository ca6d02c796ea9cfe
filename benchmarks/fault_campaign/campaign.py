"""One fault from its start to its verdict: a run that it happens to, the resume, and what was found."""

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import prepared
import slurm

from fault_campaign import deeds, ledger
from fault_campaign.draw import LOCAL, NAMESPACES, STEPS, Fault
from fault_campaign.judge import Found, is_finished
from fault_campaign.ledger import Reference
from fault_campaign.parts import TRAIN
from fault_campaign.places import RECIPE, Local, Place, Start, opened, wait_for

EPOCHS = 4
LEFT_SECONDS = 30.0  # within which the processes of a run that has ended are gone, however busy the machine is
_LOOK_SECONDS = 0.01
_KEPT = (".metadata", ".lock")  # of checkpoints and of locks, which stay in a run folder
_STACKS_SECONDS = 1.0
_QUICK = 0.15  # of the time to the first step, if nothing has to be imported
# Lines of metrics.jsonl may be lost with these, and are not written again.
_COSTS_LINES = ("full disk", "read-only folder", "torn metrics.jsonl")
# The owner of temporary folders is killed with these, so that nobody can remove them.
_OWNER_KILLED = ("kill launcher", "kill fork server", *deeds.AFTER_KILL)
_RECIPE = """
base:
  data: {name: "fault_parts:Numbered"}
  model: {name: "fault_parts:Net"}
  optim: {name: adamw, lr: 1e-2}
  batch: {global: 24}
  epochs: 4
  seed: 7
  log: {every_steps: 5, ledger: true, tensorboard: false}
  checkpoint: {every_steps: 7, every_epochs: null, keep: 3}
  runtime: {timeout_seconds: 12, start_timeout_seconds: 30, margin_seconds: 1, device: cpu}
"""
_NOTHING = Fault(-1, 0, "nothing", LOCAL, "start", 1, 0, "", 0.0)


def make_reference(place_name: str, folder: Path, cluster: slurm.Cluster | None, fresh: bool) -> Reference:
    """Train without any fault in a place; what every other run there is held against."""
    fault = dataclasses.replace(_NOTHING, place=place_name)
    _set_scene(fault, folder)
    with opened(fault, folder, cluster, fresh) as place:
        start = place.start("reference", None)
        ended = wait_for(start, place)
        run = place.run_folder()
        if not ended or any(start.codes) or run is None:
            raise SystemExit(f"the undisturbed run on {place_name} does not end well: {start.codes}\n{start.screen()}")
        [segment] = ledger.read_segments(folder, place.ranks)
        losses = ledger.read_losses(run / "metrics.jsonl")
        reference = Reference(segment.batches[1:], segment.weights, losses)
    ledger.check_reference(reference, TRAIN, EPOCHS)
    return reference


def run_fault(
    fault: Fault, folder: Path, reference: Reference, cluster: slurm.Cluster | None, fresh: bool = False
) -> Found:
    """Have one fault happen to a run, resume the run, and return what was found."""
    _set_scene(fault, folder)
    found = Found()
    with deeds.with_disk(fault, folder), opened(fault, folder, cluster, fresh) as place:
        with deeds.before_start(fault, place):
            start = place.start("first", None)
            found.reached = _make_fault(fault, place, start)
            _wait_for_end(fault, place, start, found)
        found.left += [] if found.hung else _wait_until_gone(fault, place)
        _note_first(fault, place, start, found)
        place.end_all()
        deeds.undo(fault, place)
        for name in ("plan.json", "reached", "made"):
            (folder / name).unlink(missing_ok=True)
        _resume(fault, place, found)
        found.left += _wait_until_gone(fault, place) + _files_left(fault, place)
        found.ledger += _read_ledger(fault, place, reference)
    return found


def _set_scene(fault: Fault, folder: Path) -> None:
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("parts.py"), folder / "fault_parts.py")
    (folder / RECIPE).write_text(_RECIPE)
    if fault.kind in ("nothing", "taken port", "code skew") or fault.by_clock or fault.way == "clock":
        return
    plan = {"rank": fault.rank, "moment": fault.moment, "at": fault.at, "deed": deeds.deed_of(fault)}
    (folder / "plan.json").write_text(json.dumps(plan))


def _make_fault(fault: Fault, place: Place, start: Start) -> bool:
    """Wait for the moment and make the fault; returns whether the moment came."""
    folder = place.folder
    if fault.by_clock and fault.way != "clock":
        while isinstance(place, Local) and place.launcher() is None and not start.poll():
            time.sleep(_LOOK_SECONDS)
        is_quick = isinstance(place, Local) and place.python == prepared.PYTHON
        time.sleep(fault.delay_seconds * (_QUICK if is_quick else 1.0))
        if start.poll():
            return False
        deeds.make(fault, place, start)
        return True
    if not (folder / "plan.json").exists():
        return True
    awaited = folder / ("plan.done" if deeds.is_made_by_rank(fault) else "reached")
    deadline = time.monotonic() + place.limit_seconds
    looked = 0.0
    while not awaited.exists():
        if time.monotonic() > deadline:
            return False
        if time.monotonic() - looked > 0.5:  # asking Slurm takes a while
            looked = time.monotonic()
            if start.poll() and not awaited.exists():
                return False
        time.sleep(_LOOK_SECONDS)
    if not deeds.is_made_by_rank(fault):
        try:
            deeds.make(fault, place, start)
        finally:
            (folder / "made").touch()
    return True


def _wait_for_end(fault: Fault, place: Place, start: Start, found: Found) -> None:
    """Wait for the end of the first start; a stopped rank that nobody ends is killed when the others have ended."""
    if fault.place == NAMESPACES and fault.kind == "stop rank":
        others = Start(start.label, [], [each for rank, each in enumerate(start.popens) if rank != fault.rank])
        found.hung = not wait_for(others, place)
        place.signal_rank(fault.rank, signal.SIGKILL)
    found.hung = found.hung or not wait_for(start, place)
    if found.hung:
        _note_hang(place, "hang.txt")


def _note_hang(place: Place, name: str) -> None:
    """Write down which processes have not ended, and have ranks write the stacks of their threads."""
    (place.folder / name).write_text("\n".join(place.left()) + "\n")
    for rank in range(place.ranks):
        with contextlib.suppress(RuntimeError, KeyError):
            place.signal_rank(rank, signal.SIGUSR2)
    time.sleep(_STACKS_SECONDS)


def _note_first(fault: Fault, place: Place, start: Start, found: Found) -> None:
    """Note how the first start has ended."""
    found.codes, found.screen = start.codes, start.screen()
    found.started_ranks = any(place.folder.glob("trace-*.jsonl"))
    for path in place.folder.glob("trace-*.jsonl"):
        for line in ledger.read_lines(path):
            if line["event"] == "nan":
                found.fault_step = line["step"]
    if run := place.run_folder():
        found.record, found.latest = _read_record(run), _latest(run)


def _resume(fault: Fault, place: Place, found: Found) -> None:
    """Resume with the command that the docs give, until the run is finished."""
    run = place.run_folder()
    if is_finished(found):
        return
    if fault.kind == "two resumes":
        both = [place.start(label, run) for label in ("one", "two")]
        found.resumes += [_end_resume(place, each) for each in both]
        if (_read_record(run) or {}).get("state") == "finished" and _latest(run) == STEPS:
            return
    if fault.kind.endswith("shard") and run is not None:
        refused = _end_resume(place, place.start("refused", run))
        found.resumes.append(refused)
        newest = _latest(run)
        named = {int(step) for step in re.findall(r"step-(\d+)", refused["screen"])} - {newest}
        if named:
            good = run / "checkpoints" / f"step-{max(named):06d}"
            found.resumes.append(_end_resume(place, place.start("again", None, "--resume", str(good))))
        return
    found.resumes.append(_end_resume(place, place.start("again", run)))


def _end_resume(place: Place, start: Start) -> dict[str, Any]:
    """Wait for the end of a resume, and note how it was."""
    hung = not wait_for(start, place)
    codes, screen = start.codes, start.screen()
    if hung:
        _note_hang(place, f"hang-{start.label}.txt")
        place.end_all()
    run = place.run_folder()
    segments = ledger.read_segments(place.folder, place.ranks)
    return {
        "label": start.label,
        "hung": hung,
        "codes": codes,
        "screen": screen,
        "state": (_read_record(run) or {}).get("state"),
        "latest": _latest(run),
        "trained": any(segment.label.split()[0] == start.label and segment.steps for segment in segments),
    }


def _read_ledger(fault: Fault, place: Place, reference: Reference) -> list[str]:
    """Return the mistakes of the whole run: its samples, its weights and its losses."""
    mistakes = ledger.find_mistakes(ledger.read_segments(place.folder, place.ranks), reference)
    run = place.run_folder()
    if run is None or mistakes:
        return mistakes
    may_miss = fault.kind in _COSTS_LINES
    mistakes += ledger.compare_losses(ledger.read_losses(run / "metrics.jsonl"), reference.losses, may_miss)
    if not may_miss and fault.kind != "two resumes":
        mistakes += _compare_own(run, reference)
    return mistakes[:4]


def _compare_own(run: Path, reference: Reference) -> list[str]:
    """Return where the ledger that the run itself has written differs."""
    parts: dict[int, dict[int, list[int]]] = {}
    for path in run.glob("logs/ledger-*.jsonl"):
        rank = int(path.stem.split("-")[1])
        for line in ledger.read_lines(path):
            if rank in parts.setdefault(line["step"], {}):
                return [f"{path.name} has step {line['step']} twice"]
            parts[line["step"]][rank] = line["ids"]
    own = [tuple(i for rank in sorted(parts[step]) for i in parts[step][rank]) for step in sorted(parts)]
    return [] if tuple(own) == reference.batches else ["the run's own ledger differs from the undisturbed run's"]


def _wait_until_gone(fault: Fault, place: Place) -> list[str]:
    """Return what is left of the processes of a run a while after its end."""
    if fault.kind == "lose node":
        return []  # what ran on a lost node goes with it
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := place.left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _files_left(fault: Fault, place: Place) -> list[str]:
    """Return the temporary files that are left after the last start."""
    found = []
    if fault.kind not in _OWNER_KILLED:
        found += [f"TMPDIR/{path.name}" for path in (place.folder / "tmp").iterdir() if _is_left(path)]
    if run := place.run_folder():
        found += [str(path.relative_to(run)) for path in run.rglob(".*") if not path.name.endswith(_KEPT)]
    return found


def _is_left(path: Path) -> bool:
    return not path.name.startswith(("matplotlib-", "torchinductor"))  # caches of libraries, which are meant to stay


def _read_record(run: Path | None) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((run / "record.json").read_text())  # pyright: ignore[reportOptionalOperand]
    return None


def _latest(run: Path | None) -> int | None:
    """Return the step of the newest checkpoint that can be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = (run / "checkpoints" / "latest").read_text().strip()  # pyright: ignore[reportOptionalOperand]
        json.loads((run / "checkpoints" / name / "manifest.json").read_text())  # pyright: ignore[reportOptionalOperand]
        return int(name.removeprefix("step-"))
    return None
