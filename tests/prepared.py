"""Python programs that start at once: each is forked from a process that has imported what it needs.

`PYTHON` is a program that takes the place of the interpreter, and `QUICK` a folder with `tutti` and `horovodrun` beside
it: they hand their arguments, environment, folder, streams and signals to the server of their host, and end as the
program does that it forks for them. The fork server of multiprocessing, where a program starts one, is forked from the
program in turn. With TUTTI_TEST_FRESH=1 in the environment every program has an interpreter of its own.
"""

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import marshal
import os
import pickle
import platform
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tutti.launch import local
from tutti.ranks.process import end_with_parent, name_process

# What ranks and launchers of torch import, what a run writes with, and the data that most tests train on.
TORCH = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel",
    "tutti.runs.tensorboard",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "tutti.train.torch",
    "tutti.cli.main",
    "tutti.cli.train",
    "tutti.report.curves",
    "tutti.horovod.torch",
    "rank_jobs",
)
# Triton, where torch has one, is loaded before TensorFlow: in the other order the process ends with SIGSEGV.
TENSORFLOW = (
    "torch._dynamo",
    "tutti.horovod.torch",
    "tutti.frameworks.run",
    "sklearn.datasets",
    "tensorflow",
    "rank_jobs",
)
SERVER = "tutti-prepared"  # the name that the kernel shows of a server, but not of its programs
SERVERS = "TUTTI_TEST_SERVERS"  # names the folder with the socket of each host's server
_LENGTH = struct.Struct("q")


def _write_clients() -> Path:
    """Write the programs that stand for the interpreter and its commands into a folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="tutti-quick-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder) if os.getpid() == owner else None)
    text = Path(__file__).with_name("prepared_client.py").read_text()
    for name in ("python", "tutti", "horovodrun"):
        (folder / name).write_text(f"#!{sys.executable} -ISB\n{text}")
        (folder / name).chmod(0o755)
    return folder


QUICK = Path(os.environ["TUTTI_TEST_QUICK"]) if "TUTTI_TEST_QUICK" in os.environ else _write_clients()
PYTHON = str(QUICK / "python")


class Program:
    """A running program; what `subprocess.Popen` offers of one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        data = self._connection.recv(_LENGTH.size)
        return _LENGTH.unpack(data)[0] if data else -signal.SIGKILL  # the server itself is gone

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code, or None where the program has not ended after `timeout` seconds."""
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            self.returncode = self._read()
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Server:
    """The process that has imported `modules`; programs are forked from it until it is closed."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tutti-servers-"))
        self.address = str(self.folder / os.uname().nodename)
        tests = Path(__file__).parent
        with _listen(self.address) as listener:
            call = f"import prepared; prepared._serve_here({listener.fileno()}, {tuple(modules)!r})"
            env = {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "TUTTI_TEST_QUICK": str(QUICK)}
            self._process = subprocess.Popen(
                [sys.executable, "-c", call],
                env=os.environ | env | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,  # it ends when this process does
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End the server, and with it every program that still runs."""
        self._process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, work: Callable[..., Any], *arguments: Any, env: Mapping[str, str] | None = None) -> Program:
        """Start `work(*arguments)` as a program that prints nothing."""
        call = (sys.path, pickle.dumps((work, arguments)))
        given = dict(os.environ if env is None else env)
        message = marshal.dumps((call, given, os.getcwd(), sorted(os.sched_getaffinity(0)), False))
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        with open(os.devnull, "r+") as null:
            rights = array.array("i", [null.fileno()] * 3)
            connection.sendmsg([_LENGTH.pack(len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        connection.sendall(message)
        return Program(connection)


_servers: dict[tuple[str, ...], Server] = {}


def server(modules: tuple[str, ...] = TORCH) -> Server:
    """The one server of this process with these modules, started when it is first asked for."""
    if modules not in _servers:
        _servers[modules] = Server(modules)
    return _servers[modules]


def variables(modules: tuple[str, ...] = TORCH) -> dict[str, str]:
    """The environment in which PYTHON finds the server with these modules, if it was started."""
    return {SERVERS: str(_servers[modules].folder)} if modules in _servers else {}


def serve_on_host(holder: int, address: str) -> None:
    """What a program does that becomes the server of another host, whose namespaces the process `holder` keeps."""
    name_process(SERVER)
    kinds = ("net", "uts", "ipc", "mnt", "pid_for_children")
    spaces = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    with _listen(address) as listener:
        if pid := os.fork():  # a process enters a pid namespace with its children
            os.waitpid(pid, 0)
            return
        end_with_parent()
        platform.__dict__["_uname_cache"] = None  # the name of the other host
        _serve(listener, None)


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    listener.bind(address)
    listener.listen(64)
    return listener


def _run_python(words: Sequence[str]) -> None:
    """Do what `python WORDS` does: ["-m", MODULE, ...], ["-c", TEXT, ...] or [FILE, ...]."""
    warnings.resetwarnings()
    warnings.simplefilter("default")
    cwd, own = os.getcwd(), {str(Path(__file__).parent), str(Path(__file__).parent.parent), ""}
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-m": cwd, "-c": ""}.get(words[0], str(Path(cwd, words[0]).resolve().parent))
    sys.path[:] = [first, *given, *(path for path in sys.path if path not in own), str(Path(__file__).parent.parent)]
    importlib.invalidate_caches()
    sys.executable = PYTHON
    util.spawnv_passfds = functools.partial(_fork_server, util.spawnv_passfds)  # pyright: ignore
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _fork_server(spawn: Callable[..., int], path: Any, words: Sequence[Any], fds: Sequence[int]) -> int:
    """Fork multiprocessing's fork server from this program, which has imported what that would."""
    call = words[-1] if isinstance(words[-1], str) else os.fsdecode(words[-1])
    if not call.startswith("from multiprocessing.forkserver import main") or threading.active_count() > 1:
        return spawn(path, words, fds)
    pid = os.fork()
    if not pid:
        _close_all_but(fds)
        if os.environ.pop(local.FORK_SERVER_VARIABLE, None):  # what importing it does in a process of its own
            end_with_parent()
        _end(lambda: exec(call, {}))
    return pid


def _close_all_but(kept: Sequence[int]) -> None:
    last = 2
    for number in [*sorted(fd for fd in kept if fd > 2), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(last + 1, number)
        last = number


def _serve_here(listener: int, modules: Sequence[str]) -> None:
    """Import, then serve until the standard input closes."""
    name_process(SERVER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no program copies the pages of what was imported only to look for garbage
    with socket.socket(fileno=listener) as opened:
        _serve(opened, 0)


def _serve(listener: socket.socket, alive: int | None) -> None:
    """Fork a program for each connection, and tell how each has ended; one whose client is gone is killed."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        watched = [listener, wake, *running.values(), *([] if alive is None else [alive])]
        ready, _, _ = select.select(watched, [], [])
        if alive in ready:
            for pid in running:
                _kill(pid)
            return
        if wake in ready:
            os.read(wake, 4096)
            _tell_ends(running)
        for pid in [pid for pid, client in running.items() if client in ready]:
            _kill(pid)
        if listener in ready:
            _fork_program(listener.accept()[0], running)


def _kill(pid: int) -> None:
    """Kill a program that was not waited for yet, and what it has started in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)


def _tell_ends(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(KeyError, OSError), running.pop(pid) as client:
            client.sendall(_LENGTH.pack(os.waitstatus_to_exitcode(status)))


def _fork_program(client: socket.socket, running: dict[int, socket.socket]) -> None:
    """Read a request and fork its program."""
    head, fds, _, _ = socket.recv_fds(client, _LENGTH.size, 3)
    if len(head) < _LENGTH.size:  # it was killed before it had said what it wants
        client.close()
        return
    rest, message = _LENGTH.unpack(head)[0], bytearray()
    while len(message) < rest:
        if not (part := client.recv(rest - len(message))):
            client.close()
            return
        message += part
    if not (pid := os.fork()):
        _end(lambda: _begin(bytes(message), fds))
    for fd in fds:
        os.close(fd)
    running[pid] = client
    with contextlib.suppress(OSError):
        client.sendall(_LENGTH.pack(pid))


def _begin(message: bytes, fds: Sequence[int]) -> None:
    """Become the program of a request: its streams, environment and folder, then its work."""
    end_with_parent()
    name_process("python")
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, fd in enumerate(fds):
        os.dup2(fd, stream)
    _close_all_but(())
    work, env, cwd, cores, unbuffered = marshal.loads(message)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr.reconfigure(line_buffering=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.sched_setaffinity(0, cores)
    time.tzset()
    if isinstance(work, tuple):
        sys.path[:], call = work
        function, arguments = pickle.loads(call)  # which imports from that path
        function(*arguments)
    else:
        _run_python(work)


def _end(work: Callable[[], None]) -> NoReturn:
    """Do a program's work, and end as an interpreter does; its exit code is that of `sys.exit`, or 1 for an error."""
    code: Any = 0
    try:
        try:
            work()
        finally:
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)
