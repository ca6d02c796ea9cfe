"""The reliability of `tutti bench`: verdicts on recipes with a known fault, and on recipes without one.

Claim: at least 19 of 20 verdicts are right, and no recipe without a fault is confidently said to have one.

- The cases are those of tests/bench/faults.py: slow reads, too few loader processes, a straggler, slow links between
  hosts (network namespaces, which need root; omitted otherwise), `.item()` in the step, very small batches, models too
  large for the caches; and recipes that are healthy, balanced, or vary from trial to trial.
- Those of tests/bench/overlaps.py are counted apart: batches made during the step, by threads and by processes, in 0.7
  to 2 times the time of compute, and gradients averaged during the backward pass. Near equality, "balanced" is as right
  as the longer part.
- Each is measured as by `tutti bench`, with few and short trials: mostly 5, of 2 seconds in all. Cases with the same
  number of ranks are measured one after another in the same processes, with one thread per rank.
- Where the verdict is "inconclusive", the case is measured once more with 9 trials, as the verdict says; what is said
  then counts. How many are right without that is reported beside it.
- A verdict is right if it names the injected fault (and, where more loader processes help, suggests them). For a
  healthy recipe "compute", "balanced" and "unclear" are right; if trials disagree, only "unclear" is.

It needs only this repository, and takes about 8 minutes. `--write docs/bench.md` puts the table into that page.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

if TYPE_CHECKING:
    from bench.fault_ranks import Found

LEAST_SCORE = 0.95
AGAIN_TRIALS = 9  # as an inconclusive verdict says
BEGIN, END = "<!-- verdicts: begin -->", "<!-- verdicts: end -->"
HEAD = ("case", "ranks", "injected", "verdict", "shares of a step", "right")
SHOWN = ("data loading", "compute", "communication", "straggler")  # parts of a step


def main() -> None:
    """Measures all cases; the exit code is 0 if the claim holds."""
    from bench import fault_ranks, faults, overlaps
    from namespaces import unavailable

    known = [*faults.CASES, *overlaps.CASES]
    options = _parse(sorted({case.kind for case in known}))
    if options.read:
        write_table(options.write, _page(json.loads(options.read.read_text())))
        return
    cases = [case for case in known if options.only in (None, case.kind)]
    if why := unavailable():
        print(f"cases with several hosts are omitted: {why}")
        cases = [case for case in cases if case.rate is None]
    if not cases:
        sys.exit("no case is left")
    facts = measure.conditions(ranks=max(case.ranks for case in cases), trials=max(case.trials for case in cases))
    measure.print_conditions(facts)
    found = fault_ranks.find_verdicts(cases, lambda text: print(text, flush=True), options.keep)
    at_once = {each.case.name: each.is_right for each in found}
    found = _measure_again(found)
    share, confident = fault_ranks.score(found)
    print()
    measure.print_table(HEAD, [_row(each) for each in found])
    print()
    _print_wrong(found)
    right = sum(each.is_right for each in found)
    rows = [
        dict(zip(HEAD, _row(each), strict=True))
        | {"sentence": each.sentence, "overlaps": each.case.kind.startswith(overlaps.OVERLAPPING)}
        | {"at_once": at_once[each.case.name]}
        for each in found
    ]
    print(f"{_score(rows)}, {len(confident)} healthy one(s) confidently said to have a fault")
    bars = {f"{LEAST_SCORE:.0%} right": share >= LEAST_SCORE, "no healthy recipe said to have a fault": not confident}
    measure.print_verdict(bars)
    result = {"conditions": facts, "cases": rows, "right": right, "bars": bars}
    measure.write_json(options.out, result)
    if options.write:
        write_table(options.write, _page(result))
    sys.exit(0 if all(bars.values()) else 1)


def write_table(path: Path, text: str) -> None:
    """Replaces the text between the two marks of a page."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{path} has no place for the table: expected the lines {BEGIN} and {END} in it.")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _parse(kinds: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=kinds, help="cases of one kind")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between its marks in this page")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the measurements in this folder, as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table and its conditions to this JSON file")
    parser.add_argument("--read", type=Path, metavar="FILE", help="write the table of an --out file, measure nothing")
    options = parser.parse_args()
    if options.read and not options.write:
        parser.error("--read is for --write PAGE")
    if options.only and options.write:
        parser.error("--write is for the whole set: leave out --only")
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    return options


def _row(found: "Found") -> tuple[str, ...]:
    parts = [f"{name} {100 * found.shares[name]:.0f}%" for name in SHOWN if found.shares[name] >= 0.005]
    ranks = str(found.case.ranks) + (" hosts" if found.case.rate else "")
    return found.case.name, ranks, found.case.injected, found.bound, ", ".join(parts), "yes" if found.is_right else "NO"


def _print_wrong(found: "Sequence[Found]") -> None:
    for each in found:
        if not each.is_right:
            print("\n  ".join([f"{each.case.name}: {each.sentence}", *each.measurements, ""]))


def _measure_again(found: "Sequence[Found]") -> "Sequence[Found]":
    """Returns the verdicts, those that were inconclusive from a second measurement with more trials."""
    from bench import fault_ranks

    open_cases = [
        replace(each.case, trials=AGAIN_TRIALS, seconds=AGAIN_TRIALS / each.case.trials * each.case.seconds)
        for each in found
        if each.bound == "unclear"
    ]
    print(f"{len(open_cases)} inconclusive, measured again with {AGAIN_TRIALS} trials", flush=True)
    again = {each.case.name: each for each in fault_ranks.find_verdicts(open_cases)}
    return [again.get(each.case.name, each) for each in found]


def _score(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many verdicts are right, those on parts that overlap apart."""
    apart = [row for row in rows if row["overlaps"]]
    text = f"{_right(rows)} of {len(rows)} right"
    text += f", {_right(apart)} of {len(apart)} of those with parts that overlap" if apart else ""
    at_once, apart_at_once = (sum(row["at_once"] for row in some) for some in (rows, apart))
    return f"{text}; before inconclusive ones were measured again {at_once} and {apart_at_once}"


def _right(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(row["right"] == "yes" for row in rows)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    return [*lines, *(f"| {' | '.join(row[name] for name in HEAD)} |" for row in rows), ""]


def _page(result: Mapping[str, Any]) -> str:
    """Returns the tables as Markdown, with the score and the conditions."""
    facts, cases = result["conditions"], result["cases"]
    machine, versions = facts["hardware"], facts["versions"]
    lines = _table([case for case in cases if not case["overlaps"]])
    lines += ["Parts that overlap:", "", *_table([case for case in cases if case["overlaps"]])]
    lines += [
        f"**{_score(cases)}.** {machine['processor']}, {machine['cores']} cores; Python "
        f"{versions['python']}, torch {versions['torch']}; one thread per rank, load {facts['load_before'][0]} before "
        "the first case. Made by `python benchmarks/verdicts.py --write docs/bench.md`.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
