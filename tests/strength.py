"""Show the strength of the tests: put one deliberate fault at a time into a copy of the project, and run its tests.

    python tests/strength.py [--list] [--only NAME ...] [--write FILE]

A fault is caught when a test fails with it and passes without it. Each fault names the tests that mirror the changed
code; where these pass, all tests of its package are tried. The project itself is not changed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parent.parent
ALLOWED_MISSES = 1  # of the whole table
TEST_TIMEOUT_SECONDS = 240  # of one test: a fault may make ranks wait for each other
_LEFT_OUT = (".venv", ".git", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_ALL_PASSED, _SOME_FAILED, _INTERRUPTED = 0, 1, 2  # exit codes of pytest; the last one also for errors of collection
_NOT_CAUGHT = "NOT CAUGHT"


@dataclass(frozen=True)
class Fault:
    """A deliberate mistake: `text`, which occurs once in `file`, is replaced by `replacement`."""

    name: str
    package: str
    file: str  # below tutti/
    text: str
    replacement: str
    wrong: str  # what is wrong with it, in a sentence
    tests: tuple[str, ...]  # below tests/: files or node ids that mirror the changed code


@dataclass(frozen=True)
class Result:
    """What the tests say about a fault."""

    fault: Fault
    caught_by: str | None  # the first failing test
    where: str  # which tests were run: "its tests" or "the package's tests"
    seconds: float
    note: str = ""

    @property
    def verdict(self) -> str:
        """For a reader: the first failing test, with what there is to say about it."""
        notes = [self.where] if self.caught_by and self.where != "its tests" else []
        notes += [self.note] if self.note else []
        return (self.caught_by or _NOT_CAUGHT) + (f" ({'; '.join(notes)})" if notes else "")


FAULTS = (
    Fault(
        name="partial-batch-counted",
        package="config",
        file="config/plan.py",
        text="return self.train_samples // self.global_batch",
        replacement="return -(-self.train_samples // self.global_batch)",
        wrong="The last, partial batch of an epoch counts as a step.",
        tests=("config/test_plan.py", "config/test_plan_properties.py"),
    ),
    Fault(
        name="extended-recipe-wins",
        package="config",
        file="config/load.py",
        text="return _chain(*found, seen) + layer",
        replacement="return layer + _chain(*found, seen)",
        wrong="Values of the recipe that is extended, in another file, override those of the recipe that extends it.",
        tests=("config/test_load.py",),
    ),
    Fault(
        name="file-not-synced",
        package="runs",
        file="runs/files.py",
        text="            file.flush()\n            os.fsync(file.fileno())\n",
        replacement="            file.flush()\n",
        wrong="The content of a file is not on disk when the file gets its name.",
        tests=("runs/test_files.py",),
    ),
    Fault(
        name="resumed-step-dropped",
        package="runs",
        file="runs/metrics.py",
        text='event.get("step", 0) <= last_step',
        replacement='event.get("step", 0) < last_step',
        wrong="A resumed run drops the metrics of the step that it resumes from.",
        tests=("runs/test_metrics.py",),
    ),
    Fault(
        name="failed-run-requeued",
        package="launch",
        file="launch/cluster/requeue.py",
        text="if code not in (STOPPED, LOST) and not _by_signal(code):",
        replacement="if code == 2 and not _by_signal(code):",
        wrong="A run that failed with an error of its own, other than one of its configuration, is requeued.",
        tests=("launch/cluster/test_requeue.py", "launch/cluster/test_requeue_properties.py"),
    ),
    Fault(
        name="slurm-job-not-requeued",
        package="launch",
        file="launch/cluster/schedulers/slurm.py",
        text='call("scontrol", "requeue", job_id, failing=True)',
        replacement='call("scontrol", "release", job_id, failing=True)',
        wrong="A Slurm job that should start again is released instead of requeued.",
        tests=(
            "cli/test_submit.py::test_slurm_requeues_a_run_until_it_is_complete",
            "launch/cluster/test_schedulers.py",
        ),
    ),
    Fault(
        name="rank-from-local-rank",
        package="ranks",
        file="ranks/environments/open_mpi.py",
        text='rank=number(env, "OMPI_COMM_WORLD_RANK")',
        replacement='rank=number(env, "OMPI_COMM_WORLD_LOCAL_RANK")',
        wrong="Under Open MPI the local rank is taken for the rank.",
        tests=("ranks/test_environments.py",),
    ),
    Fault(
        name="sum-not-reduced",
        package="ranks",
        file="ranks/group.py",
        text="        if self.world_size > 1:\n            dist.all_reduce(total)\n        return total",
        replacement="        return total",
        wrong="Metrics are those of the own rank: the all-reduce of the sums is missing.",
        tests=("ranks/test_group.py", "train/test_same_run.py"),
    ),
    Fault(
        name="strided-share",
        package="data",
        file="data/order.py",
        text="return self._take(step, share * size, size)",
        replacement="return self.global_ids(step)[share :: self._plan.global_batch // size]",
        wrong="Ranks take every n-th sample, so that micro-batches hold other samples on another number of ranks.",
        tests=("data/test_order.py", "data/test_order_properties.py"),
    ),
    Fault(
        name="augmentation-by-process",
        package="data",
        file="data/workers.py",
        text="        np.random.seed(value % (1 << 32))\n",
        replacement="",
        wrong="Augmentation that draws from NumPy depends on the process that makes the sample.",
        tests=("data/test_loader.py",),
    ),
    Fault(
        name="stride-in-first-convolution",
        package="models",
        file="models/resnet.py",
        text=(
            "        self.conv1 = _convolution(inputs, width, 1)\n"
            "        self.bn1 = nn.BatchNorm2d(width)\n"
            "        self.conv2 = _convolution(width, width, 3, stride)\n"
        ),
        replacement=(
            "        self.conv1 = _convolution(inputs, width, 1, stride)\n"
            "        self.bn1 = nn.BatchNorm2d(width)\n"
            "        self.conv2 = _convolution(width, width, 3)\n"
        ),
        wrong="ResNet-50 is the first version of the paper, with the stride in the 1x1 convolution, and not v1.5.",
        tests=("models/test_resnet.py",),
    ),
    Fault(
        name="momentum-twice",
        package="optim",
        file="optim/layerwise.py",
        text='        torch._foreach_mul_(velocities, group["momentum"])\n',
        replacement='        torch._foreach_mul_(velocities, group["momentum"] ** 2)\n',
        wrong="LARS applies its momentum twice in each step.",
        tests=("optim/test_layerwise.py",),
    ),
    Fault(
        name="rate-of-rank-batch",
        package="config",
        file="config/schedule.py",
        text="scale_factor(given.scaling, plan.global_batch, base)",
        replacement="scale_factor(given.scaling, plan.per_rank_batch, base)",
        wrong="The learning rate is scaled by the batch of a rank instead of the global batch.",
        tests=("config/test_schedule.py", "config/test_schedule_properties.py"),
    ),
    Fault(
        name="gradients-summed",
        package="parallel",
        file="parallel/ddp.py",
        text="return torch.mean(rows, 0, out=",
        replacement="return torch.sum(rows, 0, out=",
        wrong="Gradients that pass through shared memory are summed over ranks instead of averaged.",
        tests=("parallel/test_ddp.py",),
    ),
    Fault(
        name="statistics-not-reset",
        package="parallel",
        file="parallel/batch_statistics.py",
        text="            torch._foreach_copy_(self._means, self._start)\n",
        replacement="",
        wrong="Each pass of a step starts from the batch-norm statistics that the pass before it left.",
        tests=("parallel/test_batch_statistics.py",),
    ),
    Fault(
        name="named-before-manifest",
        package="checkpoint",
        file="checkpoint/store.py",
        text=("            sealed.write(partial)\n            _take_name(partial, final)\n"),
        replacement=("            _take_name(partial, final)\n            sealed.write(final)\n"),
        wrong="A checkpoint has its name before it has its manifest: a crash between leaves one that cannot be read.",
        tests=("checkpoint/test_durability.py", "checkpoint/test_store.py"),
    ),
    Fault(
        name="checksum-not-verified",
        package="checkpoint",
        file="checkpoint/manifest.py",
        text="if found != tuple(expected):",
        replacement="if found[0] != expected[0]:",
        wrong="Only the sizes of a checkpoint's files are verified, and not their checksums.",
        tests=("checkpoint/test_manifest.py",),
    ),
    Fault(
        name="slow-threshold-inverted",
        package="doctor",
        file="doctor/judge.py",
        text="return speed * factor < min(usual, CEILING_BYTES_PER_SECOND)",
        replacement="return speed * factor < max(usual, CEILING_BYTES_PER_SECOND)",
        wrong="A link counts as slow against 10 Gbit/s, however fast the others are.",
        tests=("doctor/test_judge.py",),
    ),
    Fault(
        name="late-clock-missed",
        package="doctor",
        file="doctor/findings.py",
        text="if abs(offset) > CLOCK_SECONDS",
        replacement="if offset > CLOCK_SECONDS",
        wrong="A host whose clock is behind is not reported.",
        tests=("doctor/test_compare.py",),
    ),
    Fault(
        name="partial-batch-weight",
        package="train",
        file="train/learner.py",
        text="meter.add_loss(loss, samples)",
        replacement="meter.add_loss(loss, per_rank_batch)",
        wrong="In validation, a last batch with fewer samples has the weight of a whole one.",
        tests=("train/test_training.py", "train/test_same_run.py"),
    ),
    Fault(
        name="window-on-every-rank",
        package="train",
        file="train/job.py",
        text='self.learner.put_totals(progress["window"], self.group.is_first)',
        replacement='self.learner.put_totals(progress["window"], True)',
        wrong="A resumed run counts the open log window once for every rank.",
        tests=("train/test_resume.py::test_on_the_same_ranks_the_end_is_bit_identical[2]",),
    ),
    Fault(
        name="granted-too-early",
        package="horovod",
        file="horovod/engine/coordinator.py",
        text="return all(rank in there or rank in self._joined for rank in self.sets[key[0]])",
        replacement="return any(rank in there or rank in self._joined for rank in self.sets[key[0]])",
        wrong="Once a rank has joined, an operation is granted before all others have submitted it.",
        tests=("horovod/test_coordinator.py", "horovod/test_coordinator_properties.py"),
    ),
    Fault(
        name="state-not-broadcast",
        package="horovod",
        file="horovod/torch/functions.py",
        text="    broadcast_parameters(tensors, root_rank)\n",
        replacement="",
        wrong="broadcast_optimizer_state leaves every rank the momentum that it has: the broadcast is missing.",
        tests=("horovod/test_functions.py",),
    ),
    Fault(
        name="last-batch-not-evaluated",
        package="frameworks",
        file="frameworks/feed.py",
        text="-(-samples // per_rank_batch)",
        replacement="samples // per_rank_batch",
        wrong="Validation in Keras and TensorFlow leaves out the last batch of a rank, where it is partial.",
        tests=("frameworks/test_feed.py",),
    ),
    Fault(
        name="loss-of-one-rank",
        package="frameworks",
        file="train/job.py",
        text="self.group.sum(torch.cat(own)).tolist()",
        replacement="torch.cat(own).tolist()",
        wrong="The log has the loss of rank 0 instead of the mean over ranks.",
        tests=("frameworks/test_runs.py",),
    ),
    Fault(
        name="update-left-out",
        package="bench",
        file="runs/step_parts.py",
        text="(StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)",
        replacement="(StepPart.FORWARD, StepPart.BACKWARD)",
        wrong="The time of the optimizer is missing in the share of compute.",
        tests=("bench/test_shares.py", "bench/test_verdict.py"),
    ),
    Fault(
        name="too-few-rounds",
        package="data",
        file="data/order.py",
        text="_ROUNDS = 8\n",
        replacement="_ROUNDS = 2\n",
        wrong="The order that is computed from the position leaves neighbours together.",
        tests=("data/test_order_at_scale.py",),
    ),
    Fault(
        name="staged-sample-unchecked",
        package="data",
        file="data/packed/index.py",
        text='            if zlib.crc32(content) == record["checksum"]:\n                return content\n',
        replacement="            return content\n",
        wrong="A sample that was damaged in the copy of a shard on a host's disk is used as it is.",
        tests=("data/packed/test_staging.py",),
    ),
    Fault(
        name="average-follows-weights",
        package="train",
        file="train/ema.py",
        text="weights, 1 - self._decay)",
        replacement="weights, self._decay)",
        wrong="Averaged weights are nearly those of the last step.",
        tests=("train/test_ema.py",),
    ),
    Fault(
        name="own-loss-of-a-rank",
        package="train",
        file="train/own_step.py",
        text="        return mean / self.ranks\n",
        replacement="        return loss.detach()\n",
        wrong="run.backward returns the loss of its rank, so that L-BFGS takes other steps on each.",
        tests=("train/test_own.py",),
    ),
    Fault(
        name="logged-twice",
        package="runs",
        file="runs/logger_process.py",
        text="        target.log(events[target.taken :])\n",
        replacement="        target.log(events)\n",
        wrong="A logger gets the events of before a resume once more.",
        tests=("runs/test_loggers.py", "runs/test_logged_runs.py"),
    ),
    Fault(
        name="tiles-share-too-little",
        package="after",
        file="after/tiles.py",
        text="(size - 2 * overlap) // multiple * multiple)",
        replacement="(size - overlap) // multiple * multiple)",
        wrong="Neighbouring tiles share half of what they must, so that borders show.",
        tests=("after/test_tiles.py", "after/test_apply.py"),
    ),
    Fault(
        name="no-margin",
        package="memory",
        file="memory/advice.py",
        text="math.ceil((peak - constant) * margin.most_factor) + margin.most_bytes",
        replacement="peak - constant",
        wrong="What torch's allocator and CUDA's libraries take is left out of what a rank needs.",
        tests=("memory/test_advice.py",),
    ),
    Fault(
        name="interval-too-narrow",
        package="forecast",
        file="forecast/forecast.py",
        text="return at((1 + share) / 2), at((1 - share) / 2)",
        replacement="return at(share), at(1 - share)",
        wrong="A 90 % interval is one of 80 %, and one of 50 % is a number.",
        tests=("forecast/test_forecast.py",),
    ),
    Fault(
        name="efficiency-against-one-rank",
        package="study",
        file="study/efficiency.py",
        text="points = [_point(runs[n], n / base,",
        replacement="points = [_point(runs[n], n,",
        wrong="Efficiency is divided by the number of ranks, also where the smallest number is not 1.",
        tests=("study/test_analysis.py", "study/test_figures.py"),
    ),
    Fault(
        name="csv-columns-swapped",
        package="report",
        file="report/study/tables.py",
        text='{"samples_per_second_low": speed.low, "samples_per_second_high": speed.high}',
        replacement='{"samples_per_second_low": speed.high, "samples_per_second_high": speed.low}',
        wrong="The lowest and the highest speed are swapped in the CSV file of a study.",
        tests=("report/study/test_csv.py", "report/study/test_report.py"),
    ),
    Fault(
        name="exit-code-lost",
        package="cli",
        file="cli/ranks.py",
        text="sys.stderr)\n    sys.exit(failure.exit_code)\n",
        replacement="sys.stderr)\n    sys.exit(1)\n",
        wrong="A launcher ends with exit code 1 whatever its ranks ended with, so that a stopped run is not requeued.",
        tests=("cli/test_ranks.py", "cli/test_bad_input.py"),
    ),
    Fault(
        name="failure-not-noted",
        package="cli",
        file="cli/ranks.py",
        text="        leave_note(Path(notes), failure)\n",
        replacement="        pass\n",
        wrong="A rank that fails does not tell its launcher why.",
        tests=("launch/test_local.py",),
    ),
)


def main() -> int:
    """Try the chosen faults and print the table; 1 where too few are caught."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it has started ends with it
    asked = _parse()
    faults = [fault for fault in FAULTS if not asked.only or fault.name in asked.only]
    if asked.list:
        for fault in faults:
            print(f"{fault.name:28} {fault.package:11} {fault.wrong}")
        return 0
    for fault in faults:
        check_text(PROJECT, fault)
    with copied_project() as copy:
        check_import(copy)
        results = []
        for number, fault in enumerate(faults, start=1):
            results.append(try_fault(copy, fault))
            taken = f"{results[-1].seconds:.0f} s"
            print(f"{number:2}/{len(faults)} {fault.name:28} {taken:>6}  {results[-1].verdict}", flush=True)
    print("\n".join(["", *show_table(results), "", count_line(results)]))
    if asked.write:
        asked.write.write_text("\n".join([*show_markdown(results), "", count_line(results), ""]))
    misses = sum(result.caught_by is None for result in results)
    return int(misses > (ALLOWED_MISSES if len(faults) == len(FAULTS) else 0))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Put deliberate faults into a copy of the project and run its tests.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="Try these faults alone.")
    parser.add_argument("--list", action="store_true", help="Print the faults and end.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Write the table as Markdown.")
    asked = parser.parse_args()
    unknown = sorted(set(asked.only or ()) - {fault.name for fault in FAULTS})
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: expected names that --list prints.")
    return asked


def check_text(root: Path, fault: Fault) -> None:
    """Refuse a fault whose text does not occur exactly once, or whose tests or package of tests are not there."""
    count = (root / "tutti" / fault.file).read_text().count(fault.text)
    if count != 1:
        raise SystemExit(
            f"{fault.name}: its text occurs {count} times in tutti/{fault.file}, expected once. Adapt the table."
        )
    for test in (fault.package, *(test.partition("::")[0] for test in fault.tests)):
        if not (root / "tests" / test).exists():
            raise SystemExit(f"{fault.name}: there is no tests/{test}. Adapt the table.")


@contextmanager
def copied_project() -> Iterator[Path]:
    """A copy of the project in a temporary folder, without what is made from it."""
    with tempfile.TemporaryDirectory(prefix="strength-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / PROJECT.name
        shutil.copytree(PROJECT, copy, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        shutil.rmtree(copy / "runs", ignore_errors=True)  # of this project; tutti/runs is a package
        yield copy


def check_import(copy: Path) -> None:
    """Refuse to go on where the tests would import another `tutti` than that of the copy."""
    call = [sys.executable, "-c", "import tutti; print(tutti.__file__)"]
    # In another folder than the copy: ranks run in one, and find it by PYTHONPATH alone.
    found = subprocess.run(call, cwd=copy.parent, env=environment(copy), capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).is_relative_to(copy):
        raise SystemExit(f"tests would import {found.stdout.strip()}, expected a file below {copy}.")


def environment(copy: Path) -> dict[str, str]:
    """The environment of the tests, in which the copy comes before the installed project."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("TUTTI_TEST_", "PYTEST_"))}
    return own | {"PYTHONPATH": str(copy)}


def try_fault(copy: Path, fault: Fault) -> Result:
    """Run the tests of a fault, then those of its package where they pass; a test that fails anyway does not count."""
    began, note = time.monotonic(), ""
    own, whole = [f"tests/{path}" for path in fault.tests], [f"tests/{fault.package}"]
    for where, paths in (("its tests", own), ("the package's tests", whole)):
        with applied(copy, fault):
            failed, text = run_tests(copy, paths)
        if failed is None:
            continue
        if run_tests(copy, [failed])[0] is not None:
            note = f"{failed} fails without the fault too"
            continue
        note = "timed out" if f"Timeout (>{TEST_TIMEOUT_SECONDS}" in text else ""
        return Result(fault, failed, where, time.monotonic() - began, note)
    return Result(fault, None, "the package's tests", time.monotonic() - began, note)


@contextmanager
def applied(copy: Path, fault: Fault) -> Iterator[None]:
    """The copy with a fault in it; restored at the end."""
    check_text(copy, fault)
    path = copy / "tutti" / fault.file
    original = path.read_text()
    try:
        _rewrite(path, original.replace(fault.text, fault.replacement))
        yield
    finally:
        _rewrite(path, original)


def _rewrite(path: Path, text: str) -> None:
    """Replace a module together with its bytecode, which Python takes for current if size and second are the same."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run_tests(copy: Path, paths: Sequence[str]) -> tuple[str | None, str]:
    """The first test that fails, or None where all pass; and the output of pytest."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    words += [f"--timeout={TEST_TIMEOUT_SECONDS}", *paths]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words, cwd=copy, env=environment(copy), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        text = output.read()
    if code == _ALL_PASSED:
        return None, text
    found = _FAILED.search(text)
    if code not in (_SOME_FAILED, _INTERRUPTED) or found is None:
        raise SystemExit(f"pytest ended with exit code {code} for {' '.join(paths)}:\n{text[-4000:]}")
    return found[1], text


def show_table(results: Sequence[Result]) -> list[str]:
    """The results as aligned lines: fault, package, what is wrong, caught by."""
    rows = [(each.fault.name, each.fault.package, each.fault.wrong, each.verdict) for each in results]
    rows = [("fault", "package", "what is wrong", "caught by"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]


def show_markdown(results: Sequence[Result]) -> list[str]:
    """The same as a table in Markdown."""
    lines = ["| fault | package | what is wrong | caught by |", "|---|---|---|---|"]
    for each in results:
        verdict = each.verdict.replace("|", "\\|")
        lines.append(f"| {each.fault.name} | `{each.fault.package}` | {each.fault.wrong} | {verdict} |")
    return lines


def count_line(results: Sequence[Result]) -> str:
    """How many faults were caught."""
    return f"{sum(result.caught_by is not None for result in results)} of {len(results)} faults caught"


if __name__ == "__main__":
    sys.exit(main())
