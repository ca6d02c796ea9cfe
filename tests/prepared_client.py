"""The program that stands for the interpreter: it has a program forked on its host, and ends as that one does.

tests/prepared.py writes it under the names `python`, `tutti` and `horovodrun`. It imports as little as can be, so that
it starts in a few milliseconds; where no server answers, the interpreter itself takes its place.
"""

import _signal
import _socket
import marshal
import os
import sys

_MODULES = {"tutti": "tutti", "horovodrun": "tutti.horovod.run.command"}
_PASSED_ON = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGTERM)


def main() -> None:
    name = os.path.basename(sys.argv[0])
    words = ["-m", _MODULES[name], *sys.argv[1:]] if name in _MODULES else sys.argv[1:]
    unbuffered = words[:1] == ["-u"]
    rest = words[unbuffered:]
    is_known = bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))
    server = _connect() if is_known and "TUTTI_TEST_FRESH" not in os.environ else None
    if server is None:
        os.execv(sys.executable, [sys.executable, *words])
    given = marshal.dumps((rest, dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)), unbuffered))
    streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
    server.sendmsg([len(given).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    server.sendall(given)
    _pass_signals_on(_read(server))
    _end(_read(server))


def _connect() -> _socket.socket | None:
    """The server of this host; None where there is none, or it was killed with its host."""
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        server.connect(f"{os.environ['TUTTI_TEST_SERVERS']}/{os.uname().nodename}")
    except (OSError, KeyError):
        return None
    return server


def _read(server: _socket.socket) -> int:
    """A number that the server tells; that of a program killed where the server is gone."""
    data = server.recv(8)
    return int.from_bytes(data, "little", signed=True) if data else -_signal.SIGKILL


def _pass_signals_on(pid: int) -> None:
    def pass_on(number: int, _: object) -> None:
        try:  # noqa: SIM105 # contextlib is one import more
            os.kill(pid, number)
        except ProcessLookupError:  # it has ended, and the server is about to say so
            pass

    for number in _PASSED_ON:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, pass_on)


def _end(code: int) -> None:
    """End as the program did: with its exit code, or by the same signal."""
    if code < 0:
        if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
