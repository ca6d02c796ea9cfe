"""`horovod.run`: call a function on every rank of a job, and return the results of all ranks."""

import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from types import ModuleType
from typing import Any

from tutti.errors import ConfigError
from tutti.horovod.helpers import get_env_rank_and_size
from tutti.horovod.run import arguments
from tutti.launch.hosts import is_local, own_address

_ADDRESS, _KEY = "TUTTI_CALL_ADDRESS", "TUTTI_CALL_KEY"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on every rank, and return the results in the order of ranks."""
    for old, new, value in (
        ("np", "num_proc", np),
        ("min_np", "min_num_proc", min_np),
        ("max_np", "max_num_proc", max_np),
    ):
        if value is not None:
            warnings.warn(f"horovod.run: {old} is called {new} now", DeprecationWarning, stacklevel=2)
    given = arguments.parse([])
    given.min_np = min_num_proc if min_num_proc is not None else min_np
    given.np = max(num_proc if np is None else np, given.min_np or num_proc)
    given.max_np = max_num_proc if max_num_proc is not None else max_np
    given.slots_per_host, given.reset_limit, given.blacklist_cooldown_range = slots, reset_limit, cooldown_range
    given.hosts, given.hostfile, given.host_discovery_script = hosts, hostfile, host_discovery_script
    given.start_timeout, given.ssh_port, given.ssh_identity_file = start_timeout, ssh_port, ssh_identity_file
    given.output_filename, given.verbose = output_filename, bool(verbose)
    given.mpi, given.mpi_args = bool(use_mpi) and not use_gloo, mpi_args
    names = network_interfaces or network_interface
    given.network_interfaces = names if names is None or isinstance(names, str) else ",".join(names)
    content = _packed((func, tuple(args), dict(kwargs or {})), func)
    return _Call(content).on_ranks(given, executable or sys.executable)


class _Call:
    """One call: it is sent to the ranks that connect, and collects their results."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.answers: dict[int, tuple[bool, bytes]] = {}
        self._key = secrets.token_bytes(16)
        self._over = False
        self._open: list[threading.Thread] = []

    def on_ranks(self, given: Namespace, python: str) -> list[Any]:
        """Start the ranks, wait until they have ended, and unpickle their results."""
        elastic = arguments.is_elastic(given)
        options = arguments.elastic_options(given) if elastic else arguments.static_options(given)
        names = [host.name for host in options.hosts] if elastic else [slot.host for slot in options.slots]  # pyright: ignore
        others = [name for name in names if not is_local(name)]
        everywhere = bool(others) or given.host_discovery_script is not None
        listener = Listener(("" if everywhere else "127.0.0.1", 0), backlog=256)
        port = int(listener.address[1])
        serving = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        serving.start()
        try:
            options.environment[_ADDRESS] = f"{_own_name(options, others, everywhere)}:{port}"
            options.environment[_KEY] = self._key.hex()
            options.environment["PYTHONPATH"] = _own_paths()
            problem = _start(given, options, [python, "-m", "tutti.horovod.run.call"])
        finally:
            self._over = True
            Client(("127.0.0.1", port)).close()  # wakes the thread that serves
            serving.join()
            listener.close()
        for thread in self._open:
            thread.join(10)
        failed = {rank: text for rank, (well, text) in sorted(self.answers.items()) if not well}
        if failed:
            raise RuntimeError("\n".join(f"rank {rank} failed:\n{text.decode()}" for rank, text in failed.items()))
        if problem is not None:
            raise RuntimeError(problem)
        return [pickle.loads(self.answers[rank][1]) for rank in sorted(self.answers)]

    def _serve(self, listener: Listener) -> None:
        while True:
            connection = listener.accept()
            if self._over:
                connection.close()
                return
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._open.append(thread)
            thread.start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                connection.send_bytes(self.content)
                rank, well, answer = pickle.loads(connection.recv_bytes())
            except (OSError, EOFError, AuthenticationError):
                return  # the rank has ended, which its launcher reports; or it is not a rank of this job
            self.answers[rank] = (well, answer)


def _start(given: Namespace, options: Any, command: list[str]) -> str | None:
    """Run the job to its end, and describe its failure, if any."""
    if arguments.is_elastic(given):
        from tutti.horovod.run.driver import run_elastic

        code = run_elastic(options, command)
        return f"the elastic job ended with exit code {code}" if code else None
    if given.mpi:
        from tutti.horovod.run.command import mpirun_command

        words, environment = mpirun_command(options, command, given.mpi_args or "")
        code = subprocess.run(words, env=environment, check=False).returncode
        return f"mpirun ended with exit code {code}" if code else None
    from tutti.horovod.run.static_job import launch_static
    from tutti.launch.supervisor import Stopped

    try:
        ending = launch_static(options, command)
    except Stopped as stopped:
        signal.raise_signal(stopped.number)  # to this program's own handler
        raise KeyboardInterrupt from None
    return None if ending is None else ending.message()


def _own_name(options: Any, others: list[str], everywhere: bool) -> str:
    """Return the address at which ranks reach this process."""
    if not everywhere:
        return "127.0.0.1"
    interface = options.network_interfaces[0] if options.network_interfaces else None
    return own_address(interface, others[0]) if others else socket.gethostname()


def _own_paths() -> str:
    """Return this program's module search path, without the folders of Python itself."""
    of_python = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return os.pathsep.join(
        path or os.getcwd() for path in sys.path if not path.startswith(of_python) and not path.endswith(".zip")
    )


def _packed(value: Any, func: Callable[..., Any]) -> bytes:
    """Pickle a value for the ranks, with cloudpickle where it is installed."""
    packer = _pickler()
    if packer is pickle and getattr(func, "__module__", None) == "__main__":
        raise ConfigError(
            f"{getattr(func, '__qualname__', func)} is defined in the main program, which ranks do not import: "
            "expected a function of a module. Move it into one, or install cloudpickle."
        )
    try:
        return packer.dumps(value)
    except Exception as error:
        hint = "" if packer is not pickle else ", or install cloudpickle"
        raise ConfigError(
            f"{getattr(func, '__qualname__', func)} or its arguments cannot be sent to the ranks: {error}. "
            f"Expected a function of a module with values that can be pickled{hint}."
        ) from error


def _pickler() -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def _rank_main() -> None:
    """Receive the call on a rank, execute it, and send the result."""
    host, _, port = os.environ.pop(_ADDRESS).rpartition(":")
    with Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop(_KEY))) as connection:
        well = False
        try:
            func, args, kwargs = pickle.loads(connection.recv_bytes())
            answer = _pickler().dumps(func(*args, **kwargs))
            well = True
        except BaseException:
            answer = traceback.format_exc().encode()
        connection.send_bytes(pickle.dumps((get_env_rank_and_size()[0], well, answer)))
    sys.exit(not well)


if __name__ == "__main__":
    _rank_main()
