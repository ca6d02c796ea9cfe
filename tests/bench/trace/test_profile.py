"""`tutti profile` on real ranks: what is in its files, and what it refuses."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Finished, Tutti, command
from prepared import PYTHON
from profile_work import offset_with_a_clock_ahead
from rank_jobs import run_ranks
from trace_rules import check_rules, read_file

from tutti.bench.trace.spans import intersect, union
from tutti.cli import profile as profile_command
from tutti.cli.main import app
from tutti.cli.profile import profile
from tutti.errors import ConfigError
from tutti.runs.step_parts import StepPart

pytestmark = pytest.mark.xdist_group("profile")
Profiled = tuple[Finished, Path]
PARTS = ("data loading", "forward", "backward", "optimizer", "logging")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Steps 3 and 4 of the digits on two ranks."""
    place = tmp_path_factory.mktemp("profile")
    words = ("profile", "digits", "-n", "2", "--steps", "3:4", "--memory", "log.every_steps=4")
    done = command(PYTHON, "-m", "tutti", *words, cwd=place)
    assert done.code == 0, done.all
    (folder,) = (place / "runs" / "profile" / "digits").iterdir()
    return done, folder


def named(events: list[dict[str, Any]], wanted: Callable[[str], bool], process: int | None = None) -> list[Any]:
    found = [e for e in events if e["ph"] == "X" and wanted(e["name"]) and process in (None, e["pid"])]
    return sorted(found, key=lambda event: event["ts"])


@pytest.mark.ranks
def test_each_rank_leaves_a_trace_of_exactly_the_steps(profiled: Profiled) -> None:
    for rank in (0, 1):
        events = read_file(profiled[1] / "traces" / f"rank-{rank}.json.gz")["traceEvents"]
        steps = named(events, lambda name: name.startswith("step "))
        assert [step["name"] for step in steps] == ["step 3", "step 4"]
        parts = [e["name"] for e in named(events, PARTS.__contains__)]
        once = ["data loading", *["forward", "backward"] * 2, "optimizer"]  # two passes of 16 samples on each rank
        assert parts == [*once, *once, "logging"]
        operators = [e for e in events if e.get("cat") == "cpu_op"]
        assert operators
        begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
        assert all(begin <= e["ts"] <= end for e in operators)


@pytest.mark.ranks
def test_the_timeline_shows_both_ranks_on_one_clock(profiled: Profiled) -> None:
    content = read_file(profiled[1] / "timeline.json.gz")
    check_rules(content)
    events = content["traceEvents"]
    rows = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [row.partition(" on host ")[0] for row in rows] == ["rank 0", "rank 1"]
    assert "main thread" in [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert [clock["offset_microseconds"] for clock in content["metadata"]["clocks"]] == [0.0, 0.0]
    assert content["metadata"]["steps"] == [3, 4]
    assert any(e["ph"] == "C" and e["name"] == "CPU memory" for e in events)
    averages = [named(events, lambda name: name.endswith(":all_reduce"), process) for process in (1, 2)]
    assert len(averages[0]) == len(averages[1]) >= 2
    for pair in zip(*averages, strict=True):  # neither rank is through before the other has come
        here, there = (union([(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000))]) for e in pair)
        assert intersect(here, there)


@pytest.mark.ranks
def test_the_parts_of_a_step_follow_each_other(profiled: Profiled) -> None:
    events = read_file(profiled[1] / "traces" / "rank-0.json.gz")["traceEvents"]
    parts = named(events, lambda name: name in ("data loading", "forward", "backward", "optimizer"))
    assert all(one["ts"] + one["dur"] <= next_one["ts"] + 0.01 for one, next_one in pairwise(parts))


@pytest.mark.ranks
def test_the_summary_is_printed_and_kept_beside_nothing_else(profiled: Profiled) -> None:
    done, folder = profiled
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "record.json", "logs", "traces", "timeline.json.gz", "summary.txt"}
    text = (folder / "summary.txt").read_text()
    assert text in done.out
    assert text.startswith("digits: steps 3 to 4 on 2 ranks, cpu\n")
    assert re.search(r"^1 on .*\d", text, re.MULTILINE) and re.search(r"^mean ", text, re.MULTILINE)
    assert "aten::convolution_backward" in text and "hidden behind compute" in text
    assert re.search(r"^1: CPU +[\d.]+", text, re.MULTILINE)
    assert "step 1/440" in done.out  # the way to the first step
    assert "USDT" not in done.all


@pytest.mark.ranks
def test_clocks_that_differ_are_measured() -> None:
    ahead = 3_000_000_000
    (_, _), (offset, uncertainty) = run_ranks(2, offset_with_a_clock_ahead, ahead)
    assert 0 < uncertainty < ahead // 4
    assert abs(offset - ahead) <= uncertainty


def test_on_a_gpu_the_parts_of_a_step_are_ranges_for_nsight_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from tutti.bench.trace.profile import Ranges

    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.nvtx.range_push", calls.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: calls.append("end"))
    ranges = Ranges(on_gpu=True)
    ranges.enter(StepPart.OPTIMIZER)  # before the first step: nothing is open
    ranges.begin_step(5)
    for part in (StepPart.DATA, StepPart.FORWARD, StepPart.OPTIMIZER, StepPart.OPTIMIZER):
        ranges.enter(part)
    ranges.begin_step(6)
    ranges.close()
    assert calls == ["step 5", "data loading", "end", "forward", "end", "optimizer", "end", "end", "step 6", "end"]


def test_on_a_gpu_the_recorder_calls_nsight_around_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    from tutti.bench.trace.profile import Recorder

    calls: list[str] = []
    for name in ("synchronize", "profiler.start", "profiler.stop"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda name=name: calls.append(name))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")  # Nsight has the GPU's ear: torch records the CPU
    recorder = Recorder(torch.device("cuda"), memory=False, stacks=False)
    recorder.prepare()
    recorder.start()
    with torch.profiler.record_function("step 1"):
        torch.ones(2).sum()
    recorder.stop()
    assert calls == ["synchronize", "profiler.start", "synchronize", "profiler.stop"]
    recorder.write(tmp_path / "rank-0.json.gz")
    assert named(read_file(tmp_path / "rank-0.json.gz")["traceEvents"], lambda name: name == "aten::sum")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"steps": "5"}, "expected FIRST:LAST"),
        ({"steps": "435:441", "ranks": 2}, "--steps 435:441: the recipe ends with step 440"),
        (
            {"overrides": ["framework=keras", "batch.micro=null"], "steps": "2:3"},
            "tutti train digits framework=keras batch.micro=null log.profile=[2,3]",
        ),
        ({"recipe": "job.py", "steps": "2:3"}, "--steps: for a recipe"),
        ({"recipe": "job.py", "stacks": True}, "--stacks: for a recipe"),
        ({"recipe": "nosuch.py"}, "script 'nosuch.py': no such file"),
    ],
)
def test_wrong_input_is_refused_and_leaves_nothing(
    words: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"recipe": "digits", "overrides": [], "ranks": None, "steps": None, "memory": False, "stacks": False}
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        profile(**(asked | words))
    assert refused.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_what_follows_a_script_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(profile_command, "_profile_script", lambda *words: given.extend(words))
    app(["profile", "-n", "2", "job.py", "--epochs", "1", "-n", "7"], standalone_mode=False)
    assert given == ["job.py", ["--epochs", "1", "-n", "7"], 2]


@pytest.mark.ranks
@pytest.mark.slow
def test_steps_after_an_end_that_only_the_data_determines_leave_nothing(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("profile", str(REPOSITORY / "examples" / "own_model.yaml"), "-n", "2", "--steps", "1:9999")
    assert done.code == 2
    assert "--steps 1:9999: the recipe ends with step" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_script_with_horovods_api_has_a_timeline_and_a_summary_of_it(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("profile", "-n", "2", str(REPOSITORY / "examples" / "horovod" / "pytorch_mnist.py"), "--epochs", "1")
    assert done.code == 0, done.all
    (folder,) = (tmp_path / "runs" / "profile" / "pytorch_mnist").iterdir()
    assert {path.name for path in folder.iterdir()} == {"logs", "timeline.json", "summary.txt"}
    text = (folder / "summary.txt").read_text()
    assert text in done.out
    assert re.search(r"^allreduce\.fc2\.weight +12 ", text, re.MULTILINE)
    assert "Longest waits" in text and re.search(r"^rank [01] ", text, re.MULTILINE)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_script_without_operations_is_an_error(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')\n")
    done = tutti("profile", "plain.py")
    assert done.code == 2
    assert "hello" in done.out
    assert "plain.py left no operation in a timeline: expected a script that calls hvd.init()" in done.err
