"""submit, status, logs and cancel on the command line.

The schedulers here are small scripts that note what they are asked; the job scripts are run by bash as they are. A real
Slurm is in tests/cluster. Where ranks are started, mpiexec and the ranks are real; what PBS does around them is not.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import prepared
import pytest
from conftest import REPOSITORY, Finished, Tutti, command

from tutti.cli.main import main

SBATCH = """#!/bin/bash
echo "$@" >>"$CLUSTER/asked"
[ -e "$CLUSTER/refuses" ] && { echo "sbatch: error: invalid partition specified: night" >&2; exit 1; }
echo 41
"""
SCONTROL = """#!/bin/bash
[ "$1" = requeue ] && { echo "$2" >>"$CLUSTER/queue"; exit; }
cat "$CLUSTER/job" 2>/dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
"""
NOTES_CALL = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CLUSTER/asked"
"""
QSUB = """#!/bin/bash
number=$(($(cat "$CLUSTER/queue" 2>/dev/null | wc -l) + 1))
echo "$number.pbs" | tee -a "$CLUSTER/queue"
"""
# Trains nothing: makes the checkpoints and ends with the codes that a test has written, one start after the other.
PYTHON = """#!/bin/bash
[ "$3" = train ] || exec {python} "$@"
read -r step code <"$CLUSTER/starts"
sed -i 1d "$CLUSTER/starts"
[ "$step" -gt 0 ] && printf 'step-%06d\\n' "$step" >"$4/checkpoints/latest"
[ "$code" = TERM ] && {{ kill -TERM "$PPID"; code=75; }}
exit "$code"
"""


class Cluster:
    """A login node with fake schedulers."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._capture, self._monkeypatch = folder, capture, monkeypatch
        self.programs = folder / "programs"
        self.programs.mkdir()
        fakes = {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": NOTES_CALL, "qdel": NOTES_CALL, "qsub": QSUB}
        for name, text in fakes.items():
            self.write(self.programs / name, text)
        for name in ("srun", "mpiexec"):  # starts one rank, whatever it is asked for
            self.write(self.programs / name, '#!/bin/bash\nwhile [ "${1##*/}" != python ]; do shift; done\nexec "$@"\n')
        python = folder / "python"
        self.write(python, PYTHON.format(python=prepared.PYTHON))
        for scheduler in ("slurm", "pbs"):
            (folder / f"my-{scheduler}.yaml").write_text(f"extends: {scheduler}\npython: {python}\n")
        self.settings = {"PATH": f"{self.programs}:{os.environ['PATH']}", "CLUSTER": str(folder)}
        for name, value in self.settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", str(REPOSITORY)))

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def tutti(self, *words: str) -> Finished:
        """The command, in this process."""
        self._monkeypatch.setattr(sys, "argv", ["tutti", *words])
        self._capture.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Finished(int(end.value.code or 0), *self._capture.readouterr())

    def submit(self, *words: str) -> Path:
        done = self.tutti("submit", "digits", *words)
        assert done.code == 0, done.all
        return self.folder / next(line.split()[-1] for line in done.out.splitlines() if line.startswith("run folder:"))

    def start(self, folder: Path, *starts: str, **settings: str) -> Finished:
        """Run the job script as the scheduler would; the ranks do what `starts` says."""
        (self.folder / "starts").write_text("\n".join(starts) + "\n")
        return command("bash", str(folder / "job.sh"), cwd=self.folder, **self.settings, **settings)

    def asked(self) -> str:
        return (self.folder / "asked").read_text() if (self.folder / "asked").exists() else ""

    def queue(self) -> list[str]:
        return (self.folder / "queue").read_text().split() if (self.folder / "queue").exists() else []

    def says(self, **facts: str) -> None:
        """What the scheduler answers about the job."""
        (self.folder / "job").write_text(" ".join(f"{name}={value}" for name, value in facts.items()) + "\n")


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, capsys, monkeypatch)


def assert_refused(done: Finished, *words: str) -> None:
    assert done.code == 2, done.all
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.all
    for word in words:
        assert word in done.err, done.err


@pytest.mark.system
def test_a_dry_run_shows_the_script_and_leaves_nothing(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("submit", "digits", "--on", "slurm", "--nodes", "2", "--time", "30", "--dry-run", "epochs=3")
    assert done.code == 0, done.all
    assert done.out.startswith("#!/bin/bash\n# digits on 2 nodes x 1 rank")
    assert f"FOLDER={tmp_path}/runs/digits/DATE_TIME_n2\n" in done.out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "slrm"], ["unknown site 'slrm'", "Did you mean 'slurm'?"]),
        (["--on", "slurm", "--time", "2h"], ["--time 2h", "for example 30, 30:00, 2:00:00 or 1-12:00:00"]),
        (["--on", "slurm", "--nodes", "0"], ["--nodes 0: expected 1 or more"]),
        (["--on", "slurm", "--nodes", "3"], ["does not split over 3 ranks"]),
        (
            ["--on", "slurm", "--nodes", "2", "--ranks-per-node", "3", "parallel.tensor=2"],
            ["parallel.tensor=2 with 3 ranks on a host: expected a divisor of 3"],
        ),
        (["--on", "slurm", "optim.lrr=1"], ["unknown key 'optim.lrr'", "Did you mean 'lr'?"]),
        (["--on", "slurm", "--max-requeues", "-1"], ["--max-requeues -1: expected 0 or more"]),
        (["--on", "polaris"], ["polaris charges jobs to an account", "expected --account NAME"]),
        (["--on", "slurm", "out=/proc/runs"], ["/proc cannot be written"]),
    ],
)
def test_wrong_resources_are_refused_before_anything_is_written(
    cluster: Cluster, words: list[str], message: list[str]
) -> None:
    assert_refused(cluster.tutti("submit", "digits", *words), *message)
    assert not (cluster.folder / "runs").exists()
    assert not cluster.asked()


def test_data_that_is_not_visible_from_here_is_a_warning(cluster: Cluster) -> None:
    words = ("submit", "mnist", "--on", "slurm", "--dry-run", f"data.path={cluster.folder}/mnist")
    done = cluster.tutti(*words)
    assert done.code == 0
    assert f"warning: {cluster.folder}/mnist, where the recipe reads its data, is not visible from here." in done.err
    (cluster.folder / "mnist").mkdir()  # as a download that has failed leaves it
    assert cluster.tutti(*words).err == done.err
    (cluster.folder / "mnist" / "train-images-idx3-ubyte.gz").touch()
    assert cluster.tutti(*words).err == ""


def test_two_boxes_that_are_not_visible_are_a_warning_of_a_study_too(cluster: Cluster) -> None:
    words = ("--on", "slurm", "--dry-run", f"data.train={cluster.folder}/a.h5", f"data.valid={cluster.folder}/b.h5")
    warned = (
        f"warning: {cluster.folder}/a.h5, {cluster.folder}/b.h5, where the recipe reads its data, are not visible from "
        "here. If the nodes do not see them either, fetch them (tutti data get) or set data.train and data.valid to "
        "files of a shared file system.\n"
    )
    assert cluster.tutti("submit", "nbody", *words).err == warned
    assert cluster.tutti("scale", "nbody", "--ranks", "1,2", "--mode", "weak", *words).err == warned


@pytest.mark.system
def test_a_log_of_a_rank_that_is_not_there_names_those_that_are(cluster: Cluster) -> None:
    cluster.tutti("submit", "digits", "--on", "slurm", "--nodes", "2", "--ranks-per-node", "2")
    (folder,) = (cluster.folder / "runs" / "digits").iterdir()
    assert_refused(cluster.tutti("logs", str(folder), "--rank", "4", "--follow"), f"--rank 4: {folder} has ranks 0-3.")
    for rank in range(4):
        (folder / "logs" / f"rank-{rank}.log").write_text(f"rank {rank} was here\n")
    assert_refused(cluster.tutti("logs", str(folder), "--rank", "77"), f"--rank 77: {folder} has ranks 0-3.")
    assert_refused(cluster.tutti("logs", str(folder), "--rank", "77", "--follow"), "has ranks 0-3.")
    assert cluster.tutti("logs", str(folder), "--rank", "3").out == "rank 3 was here\n"


@pytest.mark.system
def test_a_login_node_needs_no_torch_to_submit(cluster: Cluster) -> None:
    probe = (
        "import sys; from tutti.cli.main import main\n"
        "for words in (['submit', 'digits', '--on', 'slurm'], ['status'], ['cancel', 'runs']):\n"
        "    sys.argv = ['tutti', *words]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = command(sys.executable, "-c", probe, cwd=cluster.folder, **cluster.settings)
    assert done.code == 0, done.all
    assert "slurm 41" in done.out


@pytest.mark.system
def test_without_the_scheduler_the_error_names_the_missing_command(tutti: Tutti, tmp_path: Path) -> None:
    done = tutti("submit", "digits", "--on", "slurm", PATH=str(tmp_path))
    assert_refused(done, "sbatch, with which jobs are submitted to slurm, is not on this machine", "--dry-run")
    assert not any(tmp_path.iterdir())


@pytest.mark.system
def test_a_refusal_by_the_scheduler_is_shown_and_the_folder_removed(cluster: Cluster) -> None:
    (cluster.folder / "refuses").touch()
    done = cluster.tutti("submit", "digits", "--on", "slurm", "--queue", "night")
    assert_refused(done, "failed with exit code 1: sbatch: error: invalid partition specified: night")
    assert not (cluster.folder / "runs").exists()


@pytest.mark.system
def test_a_submitted_run_is_followed_to_its_end(cluster: Cluster) -> None:
    folder = cluster.submit("--on", "slurm", "--nodes", "2", "--ranks-per-node", "2", "--time", "1:00:00", "epochs=2")
    assert cluster.asked() == f"--parsable {folder}/job.sh\n"
    job = json.loads((folder / "job.json").read_text())
    assert (job["scheduler"], job["ids"], job["resources"]["ranks"], job["attempts"]) == ("slurm", ["41"], 4, [])
    assert "epochs: 2\n" in (folder / "config.yaml").read_text()

    cluster.says(JobState="PENDING", Reason="Priority")
    assert "state       waiting pending (Priority)\n" in cluster.tutti("status", str(folder)).out
    missing = cluster.tutti("logs")
    assert_refused(missing, "job-41.out does not exist: the job has not started yet", "tutti status")

    (folder / "logs" / "job-41.out").write_text("first line\n")
    (folder / "logs" / "rank-1.log").write_text("of rank 1\n")
    (folder / "record.json").write_text(json.dumps({"plan": {"total_steps": 40}, "state": "running"}))
    (folder / "metrics.jsonl").write_text('{"event": "epoch", "step": 10, "valid_accuracy": 0.5, "time": 1.0}\n')
    cluster.says(JobState="RUNNING", NodeList="n[1-2]", TimeLimit="1-01:00:00", RunTime="00:15:00")
    shown = cluster.tutti("status", str(folder)).out
    assert "state       running on n[1-2], 24:45:00 left\n" in shown
    assert "progress    step 10/40 (25.0%)\n" in shown
    assert "metrics     valid accuracy 50.00%\n" in shown
    assert cluster.tutti("logs").out == "first line\n"
    assert cluster.tutti("logs", str(folder), "--rank", "1").out == "of rank 1\n"

    cluster.says(JobState="COMPLETED", Reason="None")
    (folder / "record.json").write_text(json.dumps({"plan": {"total_steps": 40}, "state": "finished"}))
    assert cluster.tutti("logs", "--follow").out == "first line\n"  # and ends with the job
    (cluster.folder / "job").unlink()  # the scheduler has forgotten it
    row = cluster.tutti("status").out.splitlines()[1].split()
    assert row[:6] == ["slurm", "41", "digits", "complete", "0/11", "10/40"]
    done = cluster.tutti("cancel", str(folder))
    assert (done.code, done.out) == (0, "slurm job 41 has already ended: complete\n")


@pytest.mark.system
def test_a_cancelled_run_saves_and_is_not_requeued(cluster: Cluster) -> None:
    folder = cluster.submit("--on", "my-slurm.yaml")
    cluster.says(JobState="RUNNING", NodeList="n1")
    assert "signalled to save and end" in cluster.tutti("cancel", str(folder)).out
    assert cluster.asked().endswith("scancel --signal=TERM 41\n")
    cluster.tutti("cancel", str(folder))
    assert cluster.asked().endswith("scancel 41\n")
    (cluster.folder / "job").unlink()
    assert "state       cancelled\n" in cluster.tutti("status", str(folder)).out
    done = cluster.start(folder, "5 75", SLURM_JOB_ID="41")
    assert (done.code, done.out) == (1, f"tutti: {folder} is not started: it was cancelled.\n")


def test_a_folder_without_a_job_is_refused(cluster: Cluster) -> None:
    assert_refused(cluster.tutti("status", str(cluster.folder)), "is not the folder of a submitted run", "tutti submit")
    assert_refused(cluster.tutti("cancel", "nowhere"), "nowhere: no such folder")
    assert_refused(cluster.tutti("logs"), "no submitted run in runs")
    assert cluster.tutti("status").out == "no submitted runs in runs\n"


@pytest.mark.system
def test_slurm_requeues_a_run_until_it_is_complete(cluster: Cluster) -> None:
    folder = cluster.submit("--on", "my-slurm.yaml")
    for number, start in enumerate(("10 75", "20 137"), start=1):
        done = cluster.start(folder, start, SLURM_JOB_ID="41")
        assert done.code == 0, done.all
        assert f"; start {number + 1} of at most 11.\n" in done.out
        assert cluster.queue() == ["41"] * number
    done = cluster.start(folder, "30 0", SLURM_JOB_ID="41")
    assert (done.code, done.out) == (0, "tutti: the run is complete.\n")
    assert cluster.queue() == ["41"] * 2
    shown = cluster.tutti("status", str(folder)).out
    assert "state       complete\nstarts      3 of at most 11\n" in shown
    assert "checkpoints from step 10 to 20, exit code 137; requeued: it was ended by a signal" in shown


@pytest.mark.system
@pytest.mark.parametrize(
    ("start", "code", "message"),
    [
        ("10 1", 1, "tutti: not requeued: the run failed (exit code 1), and another start would fail, too.\n"),
        (
            "0 76",
            76,
            "tutti: not requeued: it lost ranks or hosts, and there is no progress since the last start.\n",
        ),
        ("10 TERM", 75, "tutti: not requeued: its job was cancelled before the end of its time.\n"),
    ],
)
def test_a_run_that_would_fail_again_ends_its_job(cluster: Cluster, start: str, code: int, message: str) -> None:
    folder = cluster.submit("--on", "my-slurm.yaml")
    done = cluster.start(folder, start, SLURM_JOB_ID="41")
    assert (done.code, done.out, cluster.queue()) == (code, message, [])


@pytest.mark.system
def test_pbs_resubmits_the_script_a_limited_number_of_times(cluster: Cluster) -> None:
    folder = cluster.submit("--on", "my-pbs.yaml", "--max-requeues", "1")
    settings = {"PBS_NODEFILE": "/dev/null"}
    assert cluster.start(folder, "10 75", PBS_JOBID="1.pbs", **settings).code == 0
    assert cluster.queue() == ["1.pbs", "2.pbs"]
    assert cluster.start(folder, "20 75", PBS_JOBID="2.pbs", **settings).code == 75
    assert cluster.queue() == ["1.pbs", "2.pbs"]
    printed = cluster.tutti("logs", str(folder)).out.splitlines()
    stopped = "it was stopped by a signal or at the end of its time"
    assert printed[0] == f"tutti: requeued: {stopped}; start 2 of at most 2."
    assert printed[1] == f"tutti: not requeued: {stopped}, and was already requeued 1 time, of at most 1."
    assert "state       failed\n" in cluster.tutti("status", str(folder)).out


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpiexec.mpich") is None, reason="MPICH is not installed: tests/install_launchers.sh")
def test_a_pbs_job_trains_on_real_ranks(cluster: Cluster) -> None:
    cluster.write(cluster.programs / "mpiexec", '#!/bin/bash\nexec mpiexec.mpich "$@"\n')
    (cluster.folder / "nodes").write_text("localhost\nlocalhost\n")
    folder = cluster.submit("--on", "pbs", "--ranks-per-node", "2", "--time", "10", "epochs=1", "model.name=mlp")
    done = cluster.start(folder, PBS_JOBID="1.pbs", PBS_NODEFILE=str(cluster.folder / "nodes"))
    printed = (folder / "logs" / "job-1.pbs.out").read_text()
    assert done.code == 0, printed
    assert "2 ranks on cpu" in printed
    assert printed.endswith("tutti: the run is complete.\n")
    record = json.loads((folder / "record.json").read_text())
    assert (record["state"], record["ranks"]) == ("finished", 2)
