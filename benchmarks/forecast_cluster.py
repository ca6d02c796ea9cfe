"""Forecasts that are written before the runs, on an emulated cluster of four nodes.

Claim: with the link measured or given, forecasts of four nodes from one and two are within 5% in the median and 10% at
worst over 20 settings, and all but two at most lie inside their 90% interval.

- The nodes belong to a real Slurm on this machine (tests/slurm.py), each with its own network, host name and processes.
  `tc` limits the link of every node, and for two settings that of a file server. Most of the compute time is a wait, as
  for an accelerator (slow_links_model.py); gradients, buckets, all-reduces, reading and their times are real.
- For each setting: `tutti scale` on 1 and 2 nodes, `tutti forecast` for 4, which keeps it with its date and digest,
  `tutti scale` on 4 nodes, and `tutti forecast --verify`. The link is given (`--link`) in half of the settings and
  measured by `tutti bench collectives` on 2 nodes in the others.

It needs root and Slurm (apt-get install slurm-wlm munge iproute2), a quiet machine, and takes about 20 minutes.
"""

import argparse
import contextlib
import json
import math
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
from slow_links import REPOSITORY, run_in_allocation

sys.path.insert(0, str(REPOSITORY / "tests"))

if TYPE_CHECKING:
    from slurm import Cluster

FILES = ("slow_links_model.py", "served_samples.py")
SERVER = "login:7070"
LATENCY = "200us"
LAYERS = 4
MOST_MEDIAN, MOST_WORST, MOST_OUTSIDE = 0.05, 0.10, 2
HEAD = ("setting", "link", "gradients", "mode", "forecast", "measured", "error", "90% interval", "inside", "note")


@dataclass(frozen=True)
class Setting:
    """A network, its links, and what disturbs it."""

    mbit: int
    megabytes: float  # of gradients
    seconds: float  # of compute, with the batch of a rank on one node
    buckets: int = 1
    mode: str = "weak"
    is_measured: bool = False  # the link: measured by collectives, or given
    slow_seconds: float = 0.0  # of rank 1 in every step
    server_mbit: int | None = None  # of the file server
    sample_kilobytes: int = 0
    batch: int = 4  # of a rank in weak mode, of all in strong mode

    @property
    def note(self) -> str:
        parts = [f"{self.buckets} buckets"] if self.buckets > 1 else []
        parts += ["slow rank"] if self.slow_seconds else []
        parts += [f"file server of {self.server_mbit} Mbit/s"] if self.server_mbit else []
        return ", ".join(parts)

    def recipe(self) -> dict[str, Any]:
        """The recipe of its runs."""
        features, classes = 16, 10
        width = int(math.sqrt(self.megabytes * 1e6 / 4 / LAYERS))
        data: dict[str, Any] = {"name": "synthetic", "shape": [features], "classes": classes, "train": 8192, "valid": 4}
        if self.server_mbit:
            size = self.sample_kilobytes * 1000
            data = {"name": "served_samples:ServedSamples", "server": SERVER, "sample_bytes": size}
            data |= {"features": features, "samples": 8192}
        model = {"name": "slow_links_model:SlowNetwork", "inputs": features, "width": width, "classes": classes}
        model |= {"seconds_per_sample": self.seconds / self.batch, "depth": LAYERS, "slow_seconds": self.slow_seconds}
        size_key = "per_rank" if self.mode == "weak" else "global"
        return {
            "data": data,
            "model": model,
            "optim": {"name": "sgd", "lr": 0.001},
            "batch": {size_key: self.batch},
            "ddp": {"bucket_mb": 1.1 * self.megabytes / self.buckets * 1e6 / 2**20 + 0.2 * (self.buckets == 1)},
            "epochs": 1,
        }


SETTINGS = (
    Setting(1000, 20, 0.6),
    Setting(1000, 5, 0.3, is_measured=True),
    Setting(1000, 20, 0.6, buckets=4, is_measured=True),
    Setting(500, 20, 0.8, is_measured=True),
    Setting(500, 20, 0.5, buckets=4),
    Setting(500, 1, 0.2, is_measured=True),
    Setting(200, 5, 0.5),
    Setting(200, 5, 0.4, buckets=4, is_measured=True),
    Setting(200, 20, 1.5, buckets=4),
    Setting(200, 5, 1.6, mode="strong", batch=16, is_measured=True),
    Setting(100, 2, 0.4),
    Setting(100, 5, 0.6, buckets=4, is_measured=True),
    Setting(100, 2, 1.2, mode="strong", batch=16),
    Setting(50, 0.2, 0.25),
    Setting(50, 1, 0.4, is_measured=True),
    Setting(50, 2, 0.6, buckets=2),
    Setting(500, 5, 0.5, slow_seconds=0.12, is_measured=True),
    Setting(200, 1, 0.5, slow_seconds=0.2),
    Setting(1000, 1, 0.3, server_mbit=100, sample_kilobytes=800),
    Setting(1000, 5, 0.4, server_mbit=50, sample_kilobytes=800, is_measured=True),
)


def main() -> None:
    """Runs the settings; the exit code is 0 if the claim holds."""
    import slurm

    options = _parse()
    if why := slurm.unavailable():
        sys.exit(f"no nodes are available here: {why}")
    chosen = {number: SETTINGS[number - 1] for number in options.settings}
    facts = measure.conditions(ranks=4, trials=1, steps=options.steps)
    measure.print_conditions(facts)
    rows = []
    with (
        measure.kept_folder(options.keep, "tutti-forecast-") as folder,
        slurm.running() as cluster,
        _file_server(cluster),
    ):
        for name in FILES:
            shutil.copy(Path(__file__).with_name(name), folder)
        collectives: dict[int, Path] = {}
        for number, setting in chosen.items():
            _limit(cluster, setting)
            if setting.is_measured and setting.mbit not in collectives:
                collectives[setting.mbit] = _measure_link(cluster, folder, setting.mbit)
            row = _try(cluster, folder, number, setting, collectives.get(setting.mbit), options.steps)
            rows.append(row)
            print(f"{number:2}: {' | '.join(_shown(row))}", flush=True)
    print()
    measure.print_table(HEAD, [_shown(row) for row in rows])
    bars = _bars(rows)
    measure.print_verdict(bars)
    measure.write_json(options.out, {"conditions": facts, "settings": rows, "bars": bars})
    sys.exit(0 if all(bars.values()) else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--settings", type=_numbers, default=range(1, len(SETTINGS) + 1), help="numbers, as in 1,4,17")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep studies and forecasts in this folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table and its conditions to this JSON file")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    found = [int(word) for word in text.split(",")]
    if not all(1 <= each <= len(SETTINGS) for each in found):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to {len(SETTINGS)}")
    return found


@contextlib.contextmanager
def _file_server(cluster: "Cluster") -> Iterator[None]:
    import slurm

    program = Path(__file__).with_name("served_samples.py")
    words = [sys.executable, str(program), SERVER.rpartition(":")[2]]
    with cluster.hosts.start(slurm.LOGIN, words) as process:
        assert process.stdout and process.stdout.readline() == "serving\n"
        try:
            yield
        finally:
            process.kill()


def _limit(cluster: "Cluster", setting: Setting) -> None:
    """Gives every node the rate of the setting, and the file server its own."""
    import slurm

    rates = dict.fromkeys(slurm.NODES, setting.mbit) | {slurm.LOGIN: setting.server_mbit or 1000}
    for host, rate in rates.items():
        limit = f"tbf rate {rate}mbit burst 128kb latency 50ms"
        cluster.hosts.by_name[host].shell(f"tc qdisc replace dev eth0 root {limit}")


def _measure_link(cluster: "Cluster", folder: Path, mbit: int) -> Path:
    import slurm

    out = folder / f"links-{mbit}"
    words = (
        f"{slurm.TUTTI} bench collectives --operations all_reduce --sizes 64KB,256KB,1MB,4MB --trials 3 --seconds 20"
    )
    _run(cluster, [f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {words} out={out}"], folder)
    [found] = out.glob("**/collectives.json")
    return found.parent


def _try(
    cluster: "Cluster", folder: Path, number: int, setting: Setting, collectives: Path | None, steps: int
) -> dict[str, Any]:
    """Measures 1 and 2 nodes, forecasts 4, runs them, and sets them beside the forecast."""
    import slurm

    place = folder / f"setting-{number}"
    place.mkdir()
    recipe = folder / f"setting_{number}.yaml"
    recipe.write_text(json.dumps(setting.recipe()))
    scale = f"{slurm.TUTTI} scale {recipe.name} --mode {setting.mode} --warmup 2 --steps {steps} --out {place}"
    link = f"--link {setting.mbit}Mbit,{LATENCY}"
    if setting.is_measured:
        link = f"--collectives {shlex.quote(str(collectives))}"
    forecast = f"{slurm.TUTTI} forecast $(dirname {place}/studies/*/*/study.json) --ranks 4 --fabric tcp {link}"
    verify = f"{slurm.TUTTI} forecast --verify --out {place} --json"
    commands = [f"{scale} --ranks 1,2", forecast, f"{scale} --ranks 4", f"{verify} > {place}/verified.json"]
    _run(cluster, commands, folder)
    [checked] = json.loads((place / "verified.json").read_text())["checked"]
    return {"number": number, "setting": asdict(setting), "note": setting.note, **checked}


def _run(cluster: "Cluster", commands: Sequence[str], folder: Path) -> None:
    with open(folder / "output.txt", "a") as output, contextlib.redirect_stdout(output):
        run_in_allocation(cluster, [[each] for each in commands], folder)


def _shown(row: Mapping[str, Any]) -> list[str]:
    setting = Setting(**row["setting"])
    low, high = row["interval90"]
    return [
        str(row["number"]),
        f"{setting.mbit} Mbit/s, {'measured' if setting.is_measured else 'given'}",
        f"{setting.megabytes:g} MB",
        setting.mode,
        f"{row['forecast']:.2f}",
        f"{row['measured']:.2f}",
        f"{row['error']:+.1%}",
        f"{low:.2f} to {high:.2f}",
        "yes" if low <= row["measured"] <= high else "no",
        setting.note,
    ]


def _bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    errors = [abs(row["error"]) for row in rows]
    outside = sum(not row["interval90"][0] <= row["measured"] <= row["interval90"][1] for row in rows)
    median, worst = statistics.median(errors), max(errors)
    return {
        f"median error {median:.1%}, at most {MOST_MEDIAN:.0%}": median <= MOST_MEDIAN,
        f"worst error {worst:.1%}, at most {MOST_WORST:.0%}": worst <= MOST_WORST,
        f"{outside} outside the 90% interval, at most {MOST_OUTSIDE}": outside <= MOST_OUTSIDE,
    }


if __name__ == "__main__":
    main()
