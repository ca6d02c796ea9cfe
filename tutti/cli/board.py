"""`tutti board`: TensorBoard on a folder of runs, under names that can be read."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tutti import units
from tutti.cli.options import examples
from tutti.errors import FolderError, LaunchError
from tutti.launch.supervisor import LocalProcess, Stopped, end_processes, stopped_by_signals
from tutti.runs.listing import FOLDER, find_events, link_events

_ADDRESS = re.compile(r"^TensorBoard \S+ at (http://\S+)", re.MULTILINE)
_START_SECONDS = 120.0
_LOOK_SECONDS = 10.0  # between two searches for new runs


app = typer.Typer()


@app.command(epilog=examples("tutti board", "tutti board runs/digits --port 7007"))
def board(
    folder: Annotated[Path, typer.Argument(help="The folder of run folders, or of a study.")] = Path("runs"),
    port: Annotated[
        int | None, typer.Option(help="The port to listen on.", show_default="the first free from 6006")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The name or address to listen on; others than localhost can be reached from elsewhere.")
    ] = "localhost",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the names of the runs and the command.")] = False,
) -> None:
    """Open TensorBoard on runs, each under a name made of its recipe, ranks and start; new runs are added."""
    events = _events(folder)
    links = folder / FOLDER
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(links), "--host", _checked_host(host)]
    # Without a port TensorBoard itself takes a free one: one that was found here could be taken before it starts.
    words += [] if port is None else ["--port", str(_checked_port(port, host))]
    if dry_run:
        print("\n".join([*events, shlex.join(words)]))
        return
    _link(links, events)
    with tempfile.TemporaryDirectory(prefix="tutti-board-") as temporary, stopped_by_signals():
        log = Path(temporary) / "tensorboard.log"
        process = LocalProcess(words, log, os.environ)
        try:
            address = _wait_for_address(process, log)
            shown = units.count(len(events), "run")
            if host not in ("localhost", "127.0.0.1", "::1"):
                print("note: whoever reaches this address can read these runs", flush=True)
            print(f"{shown} of {folder}: {address} (Ctrl-C ends it)", flush=True)
            _follow(process, folder, links, log)
        except Stopped as stopped:
            if stopped.number != signal.SIGINT:
                sys.exit(128 + stopped.number)
        finally:
            end_processes([process])


def _events(out: Path) -> dict[str, Path]:
    if not out.is_dir():
        raise FolderError(f"{out}: no such folder of runs. Train something first, or name the folder.")
    events = find_events(out)
    if not events:
        raise FolderError(f"{out} holds no run with TensorBoard's events: train one with log.tensorboard=true.")
    return events


def _link(links: Path, events: dict[str, Path]) -> None:
    try:
        link_events(links, events)
    except OSError as error:
        raise FolderError(f"{links}: cannot create links to the runs there: {error.strerror or error}.") from error


def _wait_for_address(process: LocalProcess, log: Path) -> str:
    """Return the address that TensorBoard prints once it listens there; another program may answer at a port."""
    deadline = time.monotonic() + _START_SECONDS
    while not (found := _ADDRESS.search(log.read_text(errors="replace"))):
        if process.poll() is not None:
            raise LaunchError(f"TensorBoard did not start: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise LaunchError(f"TensorBoard did not answer within {_START_SECONDS:.0f} s: {_last_line(log)}")
        time.sleep(0.1)
    return found[1]


def _follow(process: LocalProcess, out: Path, links: Path, log: Path) -> None:
    """Link new runs until TensorBoard ends."""
    while True:
        try:
            code = process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            _link(links, find_events(out))
            continue
        if code:
            raise LaunchError(f"TensorBoard ended with code {code}: {_last_line(log)}")
        return


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it has printed nothing."


def _checked_host(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise LaunchError(
            f"--host {host}: {error.strerror or error}. Expected localhost, 0.0.0.0 for all addresses, or "
            "a name of this machine."
        ) from error
    return host


def _checked_port(port: int, host: str = "localhost") -> int:
    if not 0 < port < 65536:
        raise LaunchError(f"--port {port}: expected a number from 1 to 65535.")
    if _is_taken(port, host):
        raise LaunchError(f"--port {port} is taken by another program: choose another, or leave --port out.")
    return port


def _is_taken(port: int, host: str) -> bool:
    """Returns whether a program accepts connections at this port."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
