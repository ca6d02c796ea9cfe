"""`tutti bench` on the command line."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import Tutti, environment
from prepared import PYTHON
from rank_jobs import run_ranks
from waiting import wait_for_end, wait_until

from tutti.bench.measure import bench, check, measure, read_variants
from tutti.bench.results import PARTS, PHASES, read_measurements
from tutti.bench.session import open_session
from tutti.config.load import resolve
from tutti.errors import ConfigError
from tutti.ranks.environments import discover


@pytest.mark.ranks
def test_a_recipe_is_measured_on_every_rank_and_judged(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("bench", "digits", "-n", "2", "--seconds", "1", "--trials", "2")
    assert done.code == 0, done.all
    (folder,) = (tmp_path / "runs" / "bench" / "digits").iterdir()
    assert {"bench.json", "bench.png", "config.yaml", "record.json"} <= {path.name for path in folder.iterdir()}
    (found,) = read_measurements(folder / "bench.json")
    assert set(found.seconds) == set(PHASES) - {"copy"}, "all phases but the copy to a GPU"
    assert set(found.parts) == {part.key for part in PARTS}
    assert found.trials in (1, 2), "those that fit into the time, which depends on the machine"
    for times in (*found.seconds.values(), *found.parts.values()):
        assert [len(trials) for trials in times] == [found.trials] * 2, "as many on two ranks"
    for rank, trial in ((rank, trial) for rank in range(2) for trial in range(found.trials)):
        whole = found.seconds["whole"][rank][trial]
        assert sum(found.parts[part.key][rank][trial] for part in PARTS) == pytest.approx(whole, rel=1e-3)
    verdict = json.loads((folder / "bench.json").read_text())["verdicts"][0]
    assert verdict["sentence"] in done.out
    assert f"run folder: {folder.relative_to(tmp_path)}" in done.out
    record = json.loads((folder / "record.json").read_text())
    assert (record["kind"], record["state"], record["ranks"]) == ("bench", "finished", 2)
    assert "digits" not in tutti("runs").out, "what was only measured is no run"


SAMPLES = """
from pathlib import Path
from tutti.data.builtin import digits

class Samples:
    '''The digits one by one, as loader processes make them.'''

    def __init__(self, split):
        self.inputs, self.targets = digits(split)._inputs.float(), digits(split)._targets
        self.input_shape, self.num_classes, self.count = (1, 8, 8), 10, 0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, sample):
        self.count += 1
        if self.count == 500:
            Path("at-work").touch()
        return self.inputs[sample], self.targets[sample]
"""


@pytest.mark.ranks
@pytest.mark.parametrize("words", [[], ["-n", "2"]], ids=["one rank", "two ranks"])
def test_a_stopped_bench_prints_no_traceback_and_records_that_it_was_stopped(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(SAMPLES)
    line = [PYTHON, "-m", "tutti", "bench", "digits/mlp", "data.name=parts:Samples", "data.workers=1", *words]
    with (tmp_path / "printed").open("w") as out:
        process = subprocess.Popen([*line, "--seconds", "20"], cwd=tmp_path, env=environment(), stdout=out, stderr=out)
    said = (tmp_path / "printed").read_text
    try:
        wait_until((tmp_path / "at-work").exists, said, process)
        process.send_signal(signal.SIGTERM)
        assert wait_for_end(process, said) in (130, 143), said()
    finally:
        process.kill()
        process.wait()
    (folder,) = (tmp_path / "runs" / "bench" / "digits" / "mlp").iterdir()
    logs = "".join(path.read_text() for path in (folder / "logs").iterdir())
    assert "Traceback" not in said() + logs and "Error" not in said() + logs
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["cause"], record["failure"]) == ("interrupted", "interrupted", "stopped on SIGTERM")


def bench_slow_files(out: str, seconds: float, *overrides: str) -> tuple[int, int]:
    """The trials of a bench whose batches take half a second by a clock that nobody waits for, and all its batches."""
    from bench import fault_parts

    given = [f"out={out}", "data.name=bench.fault_parts:SlowByClock", "model.hidden=[8]", *overrides]
    config = resolve("digits/mlp", given).config
    with open_session("bench", config, discover(os.environ)) as session:
        found = measure(session, config, seconds=seconds, least_trials=0, clock=fault_parts.SlowByClock.clock)
    return found.trials, fault_parts.SlowByClock.batches


@pytest.mark.ranks
@pytest.mark.parametrize("seconds", [2.0, 4.0, 8.0])
def test_slow_reading_leaves_fewer_trials_in_the_same_time(seconds: float, tmp_path: Path) -> None:
    ((trials, batches),) = run_ranks(1, bench_slow_files, str(tmp_path), seconds)
    assert 1 <= trials < 5
    assert (batches - 1) * 0.5 <= seconds, "the first batch belongs to the start"


def bench_variants(path: str, out: str) -> str:
    """Measure variants as this rank; where the result is."""
    variants = read_variants(Path(path), "digits/mlp", [f"out={out}"])
    return str(bench(variants, discover(os.environ), None, 2, 0.2, lambda _: None).folder.path)


@pytest.mark.ranks
def test_variants_are_measured_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("as it is: []\nlarger batches: [batch.global=128]\n")
    (folder,) = run_ranks(1, bench_variants, str(tmp_path / "two.yaml"), str(tmp_path / "here"))
    assert Path(folder).parent == tmp_path / "here/bench/digits/mlp"
    first, second = read_measurements(Path(folder) / "bench.json")
    assert (first.name, second.name, second.overrides) == ("as it is", "larger batches", ("batch.global=128",))
    assert (first.global_batch, second.global_batch) == (64, 128)
    assert "exchange" not in first.seconds, "one rank has nobody to talk to"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"expected names, each with a list of overrides"),
        ("more: data.workers=8", r"'more' has 'data.workers=8': expected a list of overrides, as in"),
        ("more: [data.wrkers=8]", r"unknown key 'data.wrkers'.*Did you mean 'workers'"),
        ("more: [", r"not valid YAML"),
    ],
)
def test_a_wrong_file_of_variants_is_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "variants.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_variants(tmp_path / "variants.yaml", "digits", [])


@pytest.mark.system
def test_variants_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--variants .*nowhere.yaml: cannot be read: No such file"):
        read_variants(tmp_path / "nowhere.yaml", "digits", [])


def test_what_cannot_be_measured_is_refused_before_ranks_start() -> None:
    with pytest.raises(ConfigError, match=r"--trials 1: expected 2 or more"):
        check(read_variants(None, "digits", []), 1, trials=1, seconds=1.0)
    with pytest.raises(ConfigError, match=r"--seconds 0: expected a number above 0"):
        check(read_variants(None, "digits", []), 1, trials=2, seconds=0.0)
    with pytest.raises(ConfigError, match=r"framework=keras cannot be measured: expected torch"):
        check(read_variants(None, "mnist/keras", []), 1, trials=2, seconds=1.0)


@pytest.mark.system
def test_options_of_one_kind_of_bench_are_refused_by_the_other(tutti: Tutti) -> None:
    done = tutti("bench", "digits", "--sizes", "1KB")
    assert (done.code, "--sizes and --operations are for tutti bench collectives" in done.err) == (2, True)


def test_what_a_folder_does_not_hold_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bench.json holds no measurements"):
        read_measurements(tmp_path / "bench.json")
