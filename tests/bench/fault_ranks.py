"""Ranks on which cases with faults are measured one after another: started here, or (as a program) one of them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import namespaces
from bench.faults import HEALTHY, Case
from conftest import REPOSITORY, environment
from prepared import PYTHON
from rank_jobs import reserved_port
from waiting import HangDetector

Report = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """What was said about a case."""

    case: Case
    bound: str
    sentence: str
    shares: dict[str, float]
    suggestions: tuple[str, ...]
    measurements: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        suggested = self.case.suggests is None or any(self.case.suggests in each for each in self.suggestions)
        return self.bound in self.case.right and suggested


def score(found: Sequence[Found]) -> tuple[float, list[Found]]:
    """The share of verdicts that are right, and those that find a fault in a run that has none."""
    healthy = [each for each in found if each.case.right & HEALTHY]
    wrong = [each for each in healthy if not each.is_right and each.bound not in HEALTHY - {"compute"}]
    return sum(each.is_right for each in found) / len(found), wrong


def find_verdicts(cases: Sequence[Case], report: Report = lambda _: None, keep: Path | None = None) -> list[Found]:
    """The verdicts on cases, in their order; those with the same ranks and links are measured in one launch.

    What was measured goes into a folder, if it should be kept.
    """
    launches: dict[tuple[int, str | None], list[Case]] = {}
    for case in cases:
        launches.setdefault((case.ranks, case.rate), []).append(case)
    found: dict[str, Found] = {}
    for (ranks, rate), some in launches.items():
        report(f"{len(some)} case(s) on {ranks} rank(s){f' and links of {rate}' if rate else ''}")
        found |= {each.case.name: each for each in _launch(ranks, rate, some, keep)}
    return [found[case.name] for case in cases]


def _launch(ranks: int, rate: str | None, cases: Sequence[Case], keep: Path | None) -> list[Found]:
    with tempfile.TemporaryDirectory(prefix="tutti-faults-") as folder:
        place = Path(folder)
        (place / "cases.json").write_text(json.dumps([_plain(case) for case in cases]))
        words = [PYTHON if rate is None else sys.executable, __file__, str(place)]
        if rate is None:
            _run_here(ranks, words)
        else:
            with namespaces.hosts(ranks, rate=rate) as made:
                _run_on_hosts(made, words)
        answers = json.loads((place / "found.json").read_text())
        if keep:
            shutil.copy(place / "measured.json", keep / f"{ranks}-{rate or 'here'}.json")
    return [Found(case, **_tuples(answer)) for case, answer in zip(cases, answers, strict=True)]


def _run_here(ranks: int, words: list[str]) -> None:
    with reserved_port() as port:
        places = [_variables(rank, ranks, "127.0.0.1", port, rank, ranks) for rank in range(ranks)]
        _finish(
            [
                subprocess.Popen(words, env=_environment(place), stdout=-1, stderr=subprocess.STDOUT, text=True)
                for place in (places if ranks > 1 else [{}])
            ]
        )


def _run_on_hosts(made: namespaces.Hosts, words: list[str]) -> None:
    names = list(made)
    address = made.address(names[0])
    _finish(
        [
            made.start(name, words, _environment(_variables(rank, len(names), address, 29500, 0, 1)))
            for rank, name in enumerate(names)
        ]
    )


def _finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait until all ranks have ended or one has failed; what that one says is told, and none is left."""
    hang = HangDetector()
    try:
        while any(process.poll() is None for process in processes) and not any(each.returncode for each in processes):
            hang.check(lambda: "the ranks of some cases do not end")
            time.sleep(0.05)
        failed = [process for process in processes if process.returncode]
        assert not failed, "\n".join(text for text in failed[0].communicate() if text)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _environment(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join(str(REPOSITORY / folder) for folder in (".", "tests"))
    return environment(OMP_NUM_THREADS="1", PYTHONPATH=path, **more)


def _variables(rank: int, ranks: int, address: str, port: int, local_rank: int, local_ranks: int) -> dict[str, str]:
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "GROUP_RANK": rank - local_rank,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_ranks,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def _plain(case: Case) -> dict[str, Any]:
    return {**asdict(case), "right": sorted(case.right)}


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def be_a_rank(folder: Path) -> None:
    """Measure the cases of a folder with the other ranks; rank 0 leaves what was found there."""
    from tutti.bench.measure import measure
    from tutti.bench.results import write_measurements
    from tutti.bench.session import open_session
    from tutti.config.load import resolve_values
    from tutti.ranks.environments import discover

    given = json.loads((folder / "cases.json").read_text())
    configs = [resolve_values({**case["recipe"], "out": str(folder / "out")}) for case in given]
    with open_session("bench", configs[0], discover(os.environ)) as session:
        measured = [
            measure(session, config, case["name"], trials=case["trials"], seconds=case["seconds"])
            for case, config in zip(given, configs, strict=True)
        ]
        if session.group.is_first:
            write_measurements(folder / "measured.json", measured, {})
            (folder / "found.json").write_text(json.dumps([_verdict(each) for each in measured]))


def _verdict(measured: Any) -> dict[str, Any]:
    from tutti.bench.verdict import judge

    verdict = judge(measured)
    return {
        "bound": verdict.bound,
        "sentence": verdict.sentence,
        "shares": {name: verdict.shares.share(name) for name in verdict.shares.path},
        "suggestions": [override for each in verdict.suggestions for override in each.overrides],
        "measurements": [*verdict.measurements, *measured.notes],
    }


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]))
