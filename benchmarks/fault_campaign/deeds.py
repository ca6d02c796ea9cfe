"""How each kind of fault is made, at a moment at which a rank waits for it, and how it is undone."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from conftest import REPOSITORY

from fault_campaign.draw import SLURM, Fault
from fault_campaign.places import Local, Place, Slurm, Start, hold_port, processes

DISK_SIZE = "6m"
GONE_SECONDS = 30.0
SLOW = "root tbf rate 300kbit burst 8kb latency 400ms"
DROP = "root pfifo limit 0"
_FREE = "tc qdisc del dev eth0 root 2>/dev/null || true; ip link set eth0 up"
_OFFSETS = {"+1 hour": 3600, "-1 hour": -3600, "+1 day": 86_400}
# After a SIGKILL of these the run is interrupted; what is tried is what follows.
AFTER_KILL = ("truncated shard", "flipped shard", "torn metrics.jsonl", "two resumes")


def deed_of(fault: Fault) -> str:
    """Return what the rank itself does at the moment; by default it waits for the campaign."""
    if fault.kind in ("out of memory", "NaN loss"):
        return fault.kind
    return f"clock {_OFFSETS[fault.way]}" if fault.kind == "clock jump" else "hold"


def is_made_by_rank(fault: Fault) -> bool:
    return deed_of(fault) != "hold"


@contextlib.contextmanager
def with_disk(fault: Fault, folder: Path) -> Iterator[None]:
    """The folder of the runs; a small disk for a fault that fills it. Hosts that are made later see it too."""
    runs = folder / "runs"
    runs.mkdir()
    with contextlib.ExitStack() as stack:
        if fault.kind == "full disk":
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(runs))
            stack.callback(_run, "umount", "-l", str(runs))
        if fault.kind == "read-only folder":
            stack.callback(_make_writable, runs)
        yield


@contextlib.contextmanager
def before_start(fault: Fault, place: Place) -> Iterator[None]:
    """What lasts as long as the first start of a run."""
    if fault.kind == "end of wall time" and fault.way == "clock":
        place.variables["TUTTI_JOB_ENDS"] = str(time.time() + 3 + 4 * fault.delay_seconds)
    with contextlib.ExitStack() as stack:
        if fault.kind == "taken port":
            stranger = hold_port(place.host_of_rank(0), fault.way == "talking")
            stack.callback(_end, stranger)
        if fault.kind == "code skew":
            stack.enter_context(_other_code(fault, place))
        yield


def make(fault: Fault, place: Place, start: Start) -> None:
    """Make a fault while a rank waits."""
    chance = random.Random(fault.seed)
    _DEEDS[fault.kind](fault, place, chance)


def undo(fault: Fault, place: Place) -> None:
    """Take a fault away again, once the run has ended: a repaired link, a disk with room."""
    if fault.kind.endswith("link") or (fault.kind == "lose node" and fault.place != SLURM):
        host = place.host_of_rank(fault.rank)
        host.shell(_FREE)
        if fault.kind == "lose node" and place.servers:
            place.servers.start_server(host.name)
    if fault.kind == "full disk":
        (place.folder / "runs" / "filler").unlink(missing_ok=True)
    if fault.kind == "read-only folder":
        _make_writable(place.folder / "runs")
    place.variables.pop("TUTTI_JOB_ENDS", None)
    run = place.run_folder()
    if run is not None:
        damage(fault, run)


def damage(fault: Fault, run: Path) -> None:
    """Damage the files of an interrupted run, as a crash of its host or its disk may."""
    chance = random.Random(fault.seed)
    if fault.kind.endswith("shard"):
        newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
        path = chance.choice(sorted(newest.glob("*.distcp")))
        content = bytearray(path.read_bytes())
        if fault.kind == "truncated shard":
            content = content[: chance.randrange(len(content))]
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    if fault.kind == "torn metrics.jsonl":
        path = run / "metrics.jsonl"
        content = path.read_bytes()
        last = content.rstrip(b"\n").rfind(b"\n") + 1
        cut = chance.randrange(last + 1, max(last + 2, len(content) - 1))
        garbage = bytes(chance.randrange(256) for _ in range(9)) if fault.way == "garbage" else b""
        path.write_bytes(content[:cut] + garbage)


def _kill_rank(fault: Fault, place: Place, chance: random.Random) -> None:
    place.signal_rank(fault.rank, signal.SIGKILL)


def _kill_launcher(fault: Fault, place: Place, chance: random.Random) -> None:
    assert isinstance(place, Local)
    if launcher := place.launcher():
        os.kill(launcher.pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_SECONDS
    while fault.kind in AFTER_KILL and place.left() and time.monotonic() < deadline:
        time.sleep(0.02)  # the ranks end where they wait, however long the kernel takes


def _kill_fork_server(fault: Fault, place: Place, chance: random.Random) -> None:
    assert isinstance(place, Local)
    if server := place.fork_server():
        os.kill(server.pid, signal.SIGKILL)


def _lose_node(fault: Fault, place: Place, chance: random.Random) -> None:
    host = place.host_of_rank(fault.rank)
    if isinstance(place, Slurm) and fault.way == "slurmd":
        place.cluster.signal(host.name, "KILL")
    elif isinstance(place, Slurm):
        place.cluster.lose(host.name)
    else:
        host.shell("ip link set eth0 down")
        for each in processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


def _stop_rank(fault: Fault, place: Place, chance: random.Random) -> None:
    place.signal_rank(fault.rank, signal.SIGSTOP)


def _cut(fault: Fault, place: Place, chance: random.Random) -> None:
    host = place.host_of_rank(fault.rank)
    host.shell("ip link set eth0 down" if fault.way == "down" else f"tc qdisc replace dev eth0 {DROP}")
    if fault.way == "for 3 s":
        threading.Timer(3.0, host.shell, [_FREE]).start()


def _slow(fault: Fault, place: Place, chance: random.Random) -> None:
    place.host_of_rank(fault.rank).shell(f"tc qdisc replace dev eth0 {SLOW}")


def _lossy(fault: Fault, place: Place, chance: random.Random) -> None:
    """Drop all packets in some of the moments: this kernel has no netem."""
    host = place.host_of_rank(fault.rank)
    times = [(chance.uniform(0.02, 0.12), chance.uniform(0.05, 0.3)) for _ in range(30)]
    lines = [
        f"tc qdisc replace dev eth0 {DROP}; sleep {lost:.3f}; tc qdisc del dev eth0 root; sleep {good:.3f}"
        for lost, good in times
    ]
    threading.Thread(target=_quietly(host.shell), args=("\n".join(lines),), daemon=True).start()


def _fill_disk(fault: Fault, place: Place, chance: random.Random) -> None:
    filler = place.folder / "runs" / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 14))
    with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
        while True:
            file.write(b"\0")
    if fault.way == "for 1 s":
        threading.Timer(1.0, lambda: filler.unlink(missing_ok=True)).start()


def _make_read_only(fault: Fault, place: Place, chance: random.Random) -> None:
    run = place.run_folder()
    for folder in (run, *(run / name for name in ("checkpoints", "logs"))) if run else (place.folder / "runs",):
        _run("chattr", "+i", str(folder))


def _make_writable(runs: Path) -> None:
    subprocess.run(["chattr", "-R", "-i", str(runs)], capture_output=True, check=False)


def _delete_folder(fault: Fault, place: Place, chance: random.Random) -> None:
    if run := place.run_folder():
        shutil.rmtree(run, ignore_errors=True)


def _end_wall_time(fault: Fault, place: Place, chance: random.Random) -> None:
    if isinstance(place, Slurm):
        job = place.starts[-1].job  # pyright: ignore[reportAttributeAccessIssue]
        words = ["--signal=USR1"] if fault.way == "USR1" else []
        place.cluster.run("scancel", *words, job)
        return
    assert isinstance(place, Local)
    if fault.way == "clock":
        return
    number = signal.SIGUSR1 if fault.way.startswith("USR1") else signal.SIGTERM
    launcher = place.launcher()
    if launcher is None:
        return
    if fault.way.endswith("to launcher"):
        os.kill(launcher.pid, number)
    elif fault.way.endswith("to group"):
        os.killpg(launcher.pid, number)
    elif fault.way.endswith("to rank"):
        place.signal_rank(fault.rank, number) or os.kill(launcher.pid, number)
    else:
        for each in place.with_all_below(launcher):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, number)


def _interrupt_twice(fault: Fault, place: Place, chance: random.Random) -> None:
    assert isinstance(place, Local)
    if launcher := place.launcher():
        _interrupt(launcher.pid)
        if fault.way == "at once":
            _interrupt(launcher.pid)
        else:
            threading.Timer(0.3, _interrupt, [launcher.pid]).start()


def _interrupt(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGINT)  # as a terminal does for Ctrl-C


def _nothing(fault: Fault, place: Place, chance: random.Random) -> None:
    """The fault is there before the run begins."""


_DEEDS: dict[str, Callable[[Fault, Place, random.Random], None]] = {
    "kill rank": _kill_rank,
    "kill rank 0": _kill_rank,
    "kill launcher": _kill_launcher,
    "kill fork server": _kill_fork_server,
    "lose node": _lose_node,
    "stop rank": _stop_rank,
    "cut link": _cut,
    "slow link": _slow,
    "lossy link": _lossy,
    "full disk": _fill_disk,
    "read-only folder": _make_read_only,
    "deleted folder": _delete_folder,
    **dict.fromkeys(AFTER_KILL, _kill_launcher),
    "end of wall time": _end_wall_time,
    "taken port": _nothing,
    "code skew": _nothing,
    "SIGINT twice": _interrupt_twice,
}


@contextlib.contextmanager
def _other_code(fault: Fault, place: Place) -> Iterator[None]:
    """One host with one line more in tutti's code, at the same path."""
    copy = place.folder / "another" / "tutti"
    shutil.copytree(REPOSITORY / "tutti", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "errors.py").open("a") as file:
        file.write("# one line more\n")
    is_slurm = fault.place == SLURM  # which fills the first nodes
    host = place.hosts.by_name[f"n{fault.rank + 1}"] if is_slurm else place.host_of_rank(fault.rank)
    host.shell(f"mount --bind {copy} {REPOSITORY / 'tutti'}")
    try:
        yield
    finally:
        host.shell(f"umount -l {REPOSITORY / 'tutti'}")
        shutil.rmtree(copy.parent, ignore_errors=True)


def _quietly(call: Callable[[str], None]) -> Callable[[str], None]:
    def called(text: str) -> None:
        with contextlib.suppress(AssertionError):
            call(text)

    return called


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()
