"""`horovod.run`: call a function on every rank of a job, and return the results of all ranks.

The function and its results travel as pickles, which are code. Both ends are authenticated, and a pickle is opened only
after its signature with the secret of this job was verified.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from argparse import Namespace
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tutti.horovod.errors import PROCESS_FAILED
from tutti.horovod.helpers import get_env_rank_and_size
from tutti.horovod.run import arguments
from tutti.launch.function import find_pickler, own_paths, pack_call
from tutti.launch.hosts import address_for, is_local, listening_address, reserve_port
from tutti.ranks.messages import Event, MessageServer, Peer, connect, listen
from tutti.ranks.secret import ForgedContent, Secret, find_secret

_ADDRESS = "TUTTI_CALL_ADDRESS"
_CALL = "a call of horovod.run"  # the purpose of its signature
_PART_BYTES = 4 << 20  # of a pickle in one message
_CONNECT_SECONDS = 60.0


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
    content = pack_call((func, tuple(args), dict(kwargs or {})), func)
    return _call_on_ranks(content, given, executable or sys.executable)


class CallServer(MessageServer):
    """Sends the pickled call to ranks, in parts as they ask for them, and collects their results."""

    kinds = ("part", "answer")
    keep_alive = False  # the launcher sees its ranks end

    def __init__(self, call: bytes, secret: Secret) -> None:
        super().__init__(secret)
        self.answers: dict[int, tuple[bool, bytes]] = {}  # of each rank: whether it succeeded, and its result or error
        self._secret = secret
        self._call = secret.sign(call, _CALL)
        self._parts: dict[int, list[bytes]] = {}  # of answers that are not complete

    def admit(self, arrival: int, message: dict[str, Any], peer: Peer) -> Event | None:
        """Admit every rank of the job; those of elastic jobs have no number yet."""
        return (arrival, message) if message["kind"] == "rank" else None

    def on_message(self, number: int, message: dict[str, Any]) -> None:
        """Answer a rank; the ValueError of a message that is not valid disconnects it."""
        match message:
            case {"kind": "part", "start": int(start)} if start >= 0:
                part = b64encode(self._call[start : start + _PART_BYTES]).decode()
                self.send([number], "part", part=part, size=len(self._call))
            case {"kind": "answer", "part": str(part), "last": None}:
                self._parts.setdefault(number, []).append(b64decode(part))
            case {"kind": "answer", "part": str(part), "last": {"rank": int(rank), "well": bool(well)}}:
                signed = b"".join([*self._parts.pop(number, []), b64decode(part)])
                self.answers[rank] = (well, self._verified(signed, _answer_of(rank, well)))
                self.send([number], "received")
            case {"kind": "disconnected"}:
                self._parts.pop(number, None)

    def _verified(self, signed: bytes, purpose: str) -> bytes:
        try:
            return self._secret.verify(signed, purpose)
        except ForgedContent as error:
            raise ValueError(str(error)) from error


def _answer_of(rank: int, well: bool) -> str:
    """Return the purpose of the signature of a rank's answer."""
    return f"the {'result' if well else 'error'} of rank {rank}"


def _call_on_ranks(call: bytes, given: Namespace, python: str) -> list[Any]:
    """Start the ranks, wait until they have ended, and unpickle their results."""
    options, names = _options(given)
    others = [name for name in names if not is_local(name)]
    address = listening_address(names, options.network_interfaces, given.host_discovery_script is not None)
    server = CallServer(call, options.secret)
    try:
        port = server.start(listen(0, address))
        own_name = address_for(others[0], address) if others else address or socket.gethostname()
        options.environment.update({_ADDRESS: f"{own_name}:{port}", "PYTHONPATH": own_paths()})
        problem = _start(given, options, [python, "-m", "tutti.horovod.run.call"])
    finally:
        server.close()
    failed = {rank: text for rank, (well, text) in sorted(server.answers.items()) if not well}
    if failed or problem is not None:
        errors = [f"rank {rank} failed:\n{text.decode(errors='replace')}" for rank, text in failed.items()]
        raise RuntimeError("\n".join([problem or PROCESS_FAILED, *errors]))
    return [pickle.loads(answer) for _, (_, answer) in sorted(server.answers.items())]  # the server has verified them


def _options(given: Namespace) -> tuple[Any, list[str]]:
    """Return the options of the job, and the names of its hosts."""
    if arguments.is_elastic(given):
        elastic = arguments.elastic_options(given)
        return elastic, [host.name for host in elastic.hosts]
    static = arguments.static_options(given)
    return static, [slot.host for slot in static.slots]


def _start(given: Namespace, options: Any, command: list[str]) -> str | None:
    """Run the job to its end, and describe its failure, if any."""
    if arguments.is_elastic(given):
        from tutti.horovod.run.driver import run_elastic

        code = run_elastic(options, command)
        return f"the elastic job ended with exit code {code}. {PROCESS_FAILED}" if code else None
    if given.mpi:
        from tutti.horovod.run.command import mpirun_command

        with reserve_port() as reserved:
            port = reserved.getsockname()[1]
            words, environment = mpirun_command(options, command, port, given.mpi_args or "")
            code = subprocess.run(words, env=environment, check=False).returncode
        return f"mpirun ended with exit code {code}. {PROCESS_FAILED}" if code else None
    from tutti.horovod.run.static_job import launch_static
    from tutti.launch.supervisor import Stopped

    try:
        ending = launch_static(options, command)
    except Stopped as stopped:
        signal.raise_signal(stopped.number)  # to this program's own handler
        raise KeyboardInterrupt from None
    return None if ending is None else ending.message()


def _rank_main() -> None:
    """Receive the call on a rank, execute it, and send the result."""
    host, _, port = os.environ.pop(_ADDRESS).rpartition(":")
    secret = find_secret()
    signed = _receive_call(host, int(port), secret)
    well = False
    try:
        func, args, kwargs = pickle.loads(secret.verify(signed, _CALL))
        answer = find_pickler().dumps(func(*args, **kwargs))
        well = True
    except BaseException:
        answer = traceback.format_exc().encode()
    _send_answer(host, int(port), secret, well, answer)
    sys.exit(not well)


def _receive_call(host: str, port: int, secret: Secret) -> bytes:
    """Return the signed call."""
    signed = bytearray()
    with connect(host, port, secret, _CONNECT_SECONDS, keep_alive=False) as connection:
        connection.send("rank")
        messages = connection.messages()
        while True:
            connection.send("part", start=len(signed))
            message = _next(messages)
            signed += b64decode(message["part"])
            if len(signed) == message["size"]:
                return bytes(signed)


def _send_answer(host: str, port: int, secret: Secret, well: bool, answer: bytes) -> None:
    """Send the result over a connection of its own: a call may take longer than a network keeps an idle one."""
    rank = get_env_rank_and_size()[0]
    signed = secret.sign(answer, _answer_of(rank, well))
    *first, last = (signed[start : start + _PART_BYTES] for start in range(0, len(signed), _PART_BYTES))
    with connect(host, port, secret, _CONNECT_SECONDS, keep_alive=False) as connection:
        connection.send("rank")
        for part in first:
            connection.send("answer", part=b64encode(part).decode(), last=None)
        connection.send("answer", part=b64encode(last).decode(), last={"rank": rank, "well": well})
        _next(connection.messages())


def _next(messages: Iterator[dict[str, Any]]) -> dict[str, Any]:
    for message in messages:
        return message
    sys.exit("the process that has called horovod.run has ended")


if __name__ == "__main__":
    _rank_main()
