"""Resources and job scripts: what is asked for, and the script that follows from it.

The scripts are golden files; to write them anew, look at the difference afterwards:
python -c "import sys; sys.path[:0] = ['tests', 'tests/launch/cluster']; import test_submit; test_submit.renew()"
"""

import subprocess
from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.launch.cluster.resources import Resources, Site, Wishes, load_site, parse_time, settle, show_time, site_names
from tutti.launch.cluster.staging.script import Staging
from tutti.launch.cluster.submission import JobScript, prepare, render, write_job
from tutti.ranks.secret import read_secret
from tutti.runs.folder import RunFolder

GOLDEN = Path(__file__).parent / "golden"
SCRIPTS: dict[str, tuple[str, Wishes, bool]] = {
    "slurm": ("slurm", Wishes(nodes=4, ranks_per_node=4, time="2:00:00"), False),
    "slurm-unequal": ("slurm", Wishes(nodes=3, ranks=7, cores_per_rank=2, queue="main", time="30"), False),
    "pbs": ("pbs", Wishes(nodes=4, ranks_per_node=4, cores_per_rank=8, queue="workq", time="2:00:00"), False),
    "cobalt": ("cobalt", Wishes(nodes=4, ranks_per_node=4, cores_per_rank=16, account="sdl", time="90:30"), False),
    "perlmutter": ("perlmutter", Wishes(nodes=4, account="m1234", time="1-12:00:00"), True),
    "perlmutter-shifter": ("perlmutter-shifter", Wishes(nodes=2, account="m1234", queue="debug", time="30"), False),
    "polaris": ("polaris", Wishes(nodes=4, account="datascience", time="2:00:00", directives=("-m n",)), False),
    "theta": ("theta", Wishes(nodes=4, ranks_per_node=4, account="SDL_Workshop", time="1:00:00"), False),
    "thetagpu": ("thetagpu", Wishes(nodes=2, account="SDL_Workshop", time="30"), False),
    "cori": ("cori", Wishes(nodes=8, account="dasrepo", time="30"), False),
    "slurm-staged": ("slurm", Wishes(nodes=4, ranks_per_node=4, cores_per_rank=2, time="2:00:00"), False),
    "polaris-staged": ("polaris", Wishes(nodes=4, account="datascience", time="2:00:00"), False),
}


def script(name: str) -> str:
    site_name, wishes, preflight = SCRIPTS[name]
    site = load_site(site_name)
    job = JobScript(
        recipe="mnist/large_batch",
        site=site,
        resources=settle(wishes, site, "mnist/large_batch"),
        folder=Path("/scratch/me/runs/mnist/large_batch/2026-11-15_101500"),
        working_folder=Path("/scratch/me/my project"),
        python="/home/me/venv/bin/python",
        python_path="/scratch/me/my project" if preflight else None,
        preflight=preflight,
        staging=Staging() if name.endswith("-staged") else None,
    )
    return render(job)


def renew() -> None:
    for name in SCRIPTS:
        (GOLDEN / f"{name}.sh").write_text(script(name))


@pytest.fixture(autouse=True)
def _no_sites_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.system
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_golden_one_and_shell(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    assert script(name) == path.read_text()
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_theta_starts_ranks_as_its_tutorial_does() -> None:
    """-d counts hardware threads: 16 cores of two each are 32, on which 32 threads compute."""
    text = script("theta")
    assert "  aprun -n 16 -N 4 -d 32 -j 2 -cc depth\n" in text
    assert "export OMP_NUM_THREADS=32\n" in text
    assert "export KMP_BLOCKTIME=0\n" in text


def test_every_site_has_a_golden_script() -> None:
    assert {site for site, _, _ in SCRIPTS.values()} == set(site_names())


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 1800), ("30:00", 1800), ("90:30", 5430), ("2:00:00", 7200), ("1-12:00:00", 129600)]
)
def test_times_as_schedulers_write_them(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "2h", "-5", "1:2:3:4", "00:00", "10:99", "1:60:00", "1-12", "1-12:00"])
def test_a_time_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"expected MINUTES, MINUTES:SECONDS, .* for example 30, 30:00, 2:00:00") as e:
        parse_time(text)
    assert f"--time {text}:" in str(e.value)


def test_a_time_is_written_in_hours() -> None:
    assert show_time(129600 + 61) == "36:01:01"


def with_gpus() -> Site:
    return load_site("polaris")


def asked(**wishes: object) -> Resources:
    return settle(Wishes(account="a", **wishes), with_gpus(), "digits/mlp")  # type: ignore[arg-type]


def test_a_node_gets_a_rank_for_each_gpu_and_a_rank_its_share_of_cores() -> None:
    resources = asked(nodes=3)
    assert (resources.ranks, resources.ranks_per_node, resources.cores_per_rank) == (12, 4, 8)
    assert resources.describe() == "3 nodes x 4 ranks"
    assert resources.name == "digits-mlp"


def test_a_generic_site_gets_one_rank_a_node() -> None:
    resources = settle(Wishes(nodes=2), load_site("slurm"), "digits")
    assert (resources.ranks, resources.cores_per_rank, resources.gpus_per_node) == (2, None, None)


def test_ranks_may_be_unequal() -> None:
    resources = asked(nodes=4, ranks=6)
    assert (resources.ranks_per_node, resources.equal) == (2, False)
    assert resources.describe() == "4 nodes, 6 ranks, at most 2 on each"


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"nodes": 0}, "--nodes 0: expected 1 or more"),
        ({"ranks_per_node": -1}, "--ranks-per-node -1: expected 1 or more"),
        ({"nodes": 4, "ranks": 3}, "--ranks 3 on --nodes 4 with at most 1 on each: expected 4 to 4"),
        ({"nodes": 2, "ranks": 9, "ranks_per_node": 4}, "expected 2 to 8, at least one on every node"),
        ({"cores_per_rank": 9}, "4 ranks of 9 cores need 36 cores on a node, a node of polaris has 32"),
    ],
)
def test_what_cannot_be_had_is_refused(wishes: dict[str, int], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        asked(**wishes)


def test_a_site_that_charges_jobs_asks_for_the_account() -> None:
    with pytest.raises(LaunchError, match=r"polaris charges jobs to an account .* expected --account NAME"):
        settle(Wishes(), with_gpus(), "digits")


def test_the_ranks_of_a_job_share_a_secret_that_only_its_owner_can_read(tmp_path: Path) -> None:
    submission = prepare("digits", [], "slurm", Wishes(nodes=2, ranks_per_node=2, time="30"), 0, False)
    for _ in range(2):  # written anew, the script keeps the secret of ranks that already run
        write_job(submission, RunFolder(tmp_path))
        secret = read_secret(tmp_path / "secret")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    others = [path.read_text() for path in tmp_path.iterdir() if path.name != "secret"]
    assert len(others) >= 2 and not any(secret.value.hex() in text for text in others)
    assert f"FOLDER={tmp_path}\n" in (tmp_path / "job.sh").read_text()
    assert 'export TUTTI_SECRET_FILE="$FOLDER/secret"\n' in (tmp_path / "job.sh").read_text()
