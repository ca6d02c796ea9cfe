"""A campaign of faults: runs that are killed, stopped, cut off, starved and damaged, and what becomes of them.

Faults are drawn from a seed over kinds, moments and places: local ranks, two hosts on a network of their own, and a
Slurm of four nodes, all on this machine (as root; see tests/namespaces.py and tests/slurm.py). Each happens to a run of
40 steps, which is then resumed with the ordinary command. Four questions are answered for each:

- ending: did the run end or go on as docs/reliability.md promises, without a hang, and did the resume finish it?
- cause: are the right rank and cause named on the screen and in record.json?
- ledger: was every sample of every epoch trained on exactly once over all starts, with the losses and the last weights
  of an undisturbed run?
- nothing left: are all processes, shared memory and temporary files gone?

What was trained on is known from the network itself, which writes down the samples of each forward pass.
"""

import argparse
import json
import queue
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from fault_campaign.draw import KINDS, PLACES, SLURM, Fault, draw_campaign  # noqa: E402
from fault_campaign.judge import QUESTIONS, Verdict, judge  # noqa: E402

HEAD = ("kind", "faults", *QUESTIONS)


def main() -> None:
    """Draw a campaign, run it, print the table; exit code 1 where something was missed."""
    options = _parse()
    kinds = [kind.strip() for kind in options.kinds.split(",")] if options.kinds else None
    faults = draw_campaign(options.seed, options.faults, options.where.split(","), kinds)
    if options.only is not None:
        faults = [fault for fault in faults if fault.index in {int(index) for index in options.only.split(",")}]
    if options.list:
        print("\n".join(f"{fault.line()}  [seed {fault.seed}]" for fault in faults))
        return
    if not faults:
        sys.exit(f"no faults of kind {options.kinds} in {options.where}: expected some of {', '.join(_names())}")
    with ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tutti-faults-")))
        folder.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(faults, folder.resolve(), options)
        campaign.run()
        campaign.report()
    sys.exit(0 if campaign.is_good else 1)


class Campaign:
    """Runs faults, those of one place one after another and the places side by side, and keeps what was found."""

    def __init__(self, faults: Sequence[Fault], folder: Path, options: argparse.Namespace) -> None:
        self._faults, self._folder, self._options = faults, folder, options
        self._results: list[tuple[Fault, Verdict]] = []
        self._lock = threading.Lock()
        self._broken: list[str] = []
        self._file = (folder / "faults.jsonl").open("a", buffering=1)
        self._unreached = 0

    @property
    def is_good(self) -> bool:
        return not self._broken and all(verdict.is_good for _, verdict in self._results)

    def run(self) -> None:
        """Run every fault; a line is printed for each."""
        import namespaces
        import prepared
        import slurm

        places = {fault.place for fault in self._faults}
        if why := (slurm if SLURM in places else namespaces).unavailable():
            sys.exit(f"there is no place for these faults here: {why}")
        prepared.server()
        with ExitStack() as stack:
            cluster = stack.enter_context(slurm.running()) if SLURM in places else None
            lanes = []
            for place in sorted(places):
                waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
                for fault in self._faults:
                    if fault.place == place:
                        waiting.put(fault)
                reference = Later(lambda place=place: self._make_reference(place, cluster))
                count = 1 if place == SLURM else self._options.together
                lanes += [
                    threading.Thread(target=self._run_lane, args=(waiting, reference, cluster)) for _ in range(count)
                ]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()

    def _make_reference(self, place: str, cluster: Any) -> Any:
        from fault_campaign.campaign import make_reference

        folder = self._folder / f"reference-{place}"
        shutil.rmtree(folder, ignore_errors=True)
        return make_reference(place, folder, cluster, self._options.fresh)

    def _run_lane(self, waiting: "queue.SimpleQueue[Fault]", reference: "Later", cluster: Any) -> None:
        while not waiting.empty():
            try:
                fault = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                self._run_one(fault, reference.get(), cluster)
            except BaseException:
                self._broken.append(fault.line())
                print(f"{fault.line()}: the campaign itself failed\n{traceback.format_exc()}", flush=True)

    def _run_one(self, fault: Fault, reference: Any, cluster: Any) -> None:
        from fault_campaign.campaign import run_fault

        folder = self._folder / f"fault-{fault.index}"
        _remove(folder)
        began = time.monotonic()
        found = run_fault(fault, folder, reference, cluster, self._options.fresh)
        verdict = judge(fault, found)
        content = {"fault": fault.as_dict(), "problems": verdict.problems, "reached": found.reached}
        content |= {"codes": found.codes, "latest": found.latest, "seconds": round(time.monotonic() - began, 1)}
        content |= {"record": {key: (found.record or {}).get(key) for key in _RECORDED}}
        content |= {"screen": found.screen[-3000:], "resumes": found.resumes, "repeat": self._repeat(fault)}
        with self._lock:
            self._results.append((fault, verdict))
            self._unreached += not found.reached
            self._file.write(json.dumps(content) + "\n")
            print(self._line(fault, verdict, found.reached, content["seconds"]), flush=True)
        if verdict.is_good and not self._options.keep:
            _remove(folder)

    def _line(self, fault: Fault, verdict: Verdict, reached: bool, seconds: float) -> str:
        count = f"[{len(self._results)}/{len(self._faults)}]"
        text = f"{count:>9s}{fault.line()}: {'good' if verdict.is_good else 'MISSED'}, {seconds:.0f} s"
        if not reached:
            text += " (the moment did not come)"
        for question in QUESTIONS:
            text += "".join(f"\n            {question}: {problem}" for problem in verdict.problems[question])
        return text

    def _repeat(self, fault: Fault) -> str:
        words = f"python benchmarks/faults.py --seed {self._options.seed} --faults {self._options.faults}"
        words += f" --where {self._options.where}" if self._options.where != ",".join(PLACES) else ""
        words += f" --kinds {self._options.kinds!r}" if self._options.kinds else ""
        return f"{words} --only {fault.index}"

    def report(self) -> None:
        """Print the table by kind, and how to repeat what was missed."""
        import measure

        rows = table(self._results)
        print()
        measure.print_table(HEAD, rows)
        missed = sorted((fault for fault, verdict in self._results if not verdict.is_good), key=lambda f: f.index)
        print(f"\n{len(self._results)} faults, {len(missed)} missed; seed {self._options.seed}")
        if self._unreached:
            print(f"in {self._unreached} the moment did not come: the run had ended before it")
        for fault in missed:
            print(f"{fault.line()}\n      repeat: {self._repeat(fault)} --out FOLDER")
        for line in self._broken:
            print(f"{line}: the campaign itself failed")


def table(results: Sequence[tuple[Fault, Verdict]]) -> list[list[str]]:
    """Return the rows of the table: by kind, how many faults there were and how many answers were yes."""
    by_kind: dict[str, list[Verdict]] = defaultdict(list)
    for fault, verdict in results:
        by_kind[fault.kind].append(verdict)
    by_kind = {name: by_kind[name] for name in _names() if name in by_kind}
    by_kind["all"] = [verdict for _, verdict in results]
    return [
        [kind, str(len(verdicts)), *(str(sum(each.answer(question) for each in verdicts)) for question in QUESTIONS)]
        for kind, verdicts in by_kind.items()
    ]


class Later:
    """A value that is made when it is first asked for, by one of several threads."""

    def __init__(self, make: Any) -> None:
        self._make, self._lock, self._made = make, threading.Lock(), []

    def get(self) -> Any:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


_RECORDED = ("state", "cause", "failure", "failed_rank", "failed_host", "failed_step", "step")


def _names() -> list[str]:
    return list(dict.fromkeys(kind.name for kind in KINDS))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--faults", type=int, default=100, help="how many")
    parser.add_argument("--kinds", metavar="KIND,...", help=f"only these: {', '.join(_names())}")
    parser.add_argument("--where", default=",".join(PLACES), metavar="PLACE,...", help=f"of {', '.join(PLACES)}")
    parser.add_argument("--only", metavar="INDEX,...", help="only these faults of the campaign")
    parser.add_argument("--together", type=int, default=1, help="faults of a place at a time, except on Slurm")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for faults.jsonl and the folders of what was missed"
    )
    parser.add_argument("--fresh", action="store_true", help="local launchers import torch themselves; slower")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all faults")
    parser.add_argument("--list", action="store_true", help="print the faults, and run none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
