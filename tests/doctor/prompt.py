"""Forks ranks onto hosts: torch is loaded once, and every line of input is a list of commands, one for each host."""

import ctypes
import json
import os
import platform
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch  # noqa: F401

import tutti.cli.doctor  # noqa: F401
from tutti.cli.main import main
from tutti.config.load import resolve
from tutti.doctor.run import preflight
from tutti.errors import TuttiError
from tutti.ranks.environments import discover
from tutti.ranks.group import join


def be_rank(order: dict[str, Any]) -> None:
    """One command on its host, with its output in files."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for descriptor, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{order['files']}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    spaces = [os.open(f"/proc/{order['host']}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "mnt")]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
    setattr(platform, "_uname_cache", None)  # noqa: B010, the name of the host that it was loaded on
    os.environ |= order["env"]
    os.chdir(order["cwd"])
    sys.argv = ["tutti", *order["words"]]
    train_after_preflight() if sys.argv[1] == "preflight" else main()


def train_after_preflight() -> None:
    """The preflight of a run, and then its start at the same address."""
    placement, config = discover(os.environ), resolve("digits").config
    preflight(placement, config, Path(sys.argv[2]))
    group = join(placement, config.runtime)
    print(f"joined {group.world_size} ranks", flush=True)
    group.leave()


def fork(order: dict[str, Any]) -> int:
    """The process of a rank."""
    if child := os.fork():
        return child
    code = 1
    try:
        be_rank(order)
        code = 0
    except TuttiError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    started = [(fork(order), order["files"]) for order in json.loads(line)]
    for process, files in started:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        Path(f"{files}.aside").write_text(str(code))
        Path(f"{files}.aside").replace(f"{files}.code")
