"""A network file system between hosts on one machine: OpenSSH's sftp-server, mounted by sshfs without encryption."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from namespaces import Hosts

SERVER = "/usr/lib/openssh/sftp-server"
PORT = 4022
OPEN = 3
METADATA = {OPEN, *range(4, 21)} - {5, 6}  # SFTP's requests but for init, read and write


def unavailable() -> str | None:
    """Why there is no such file system here, or nothing."""
    if not shutil.which("sshfs") or not Path(SERVER).exists() or not Path("/dev/fuse").exists():
        return "sshfs or FUSE is missing (as root: apt-get install sshfs openssh-sftp-server)"
    return None


@contextlib.contextmanager
def mounted(
    hosts: "Hosts", server: str, clients: Sequence[str], folder: Path, requests: int = 0, hold: str = "", go: str = ""
) -> Iterator[dict[str, float]]:
    """Mount a folder of one host on others; what was asked for is known at the end.

    Metadata requests of all clients together are limited to `requests` in a second, if not 0. Files whose names contain
    `hold` are not opened before the path `go` exists.
    """
    words = [sys.executable, __file__, str(folder), str(requests), hold, go]
    line = hosts.by_name[server].enter(*words)
    served: dict[str, float] = {}
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        settings = f"directport={PORT},auto_cache,allow_other,follow_symlinks"
        try:
            for client in clients:
                hosts.by_name[client].shell(f"sshfs -o {settings} {hosts.address(server)}:{folder} {folder}")
            yield served
        finally:
            for client in clients:
                hosts.by_name[client].shell(f"umount --lazy {folder} || true")
            told, _ = process.communicate()
    served |= json.loads(told)


class Server:
    """Connections of clients, each to a server process of its own, behind one limit."""

    def __init__(self, folder: str, requests: int, hold: str, go: str) -> None:
        self._folder, self._requests, self._hold, self._go = folder, requests, hold.encode(), go
        self._lock = threading.Lock()
        self._next = 0.0
        self.totals = {"metadata": 0.0, "mb": 0.0}

    def accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        words = [SERVER, "-d", self._folder]
        with connection, subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            threading.Thread(target=self._forward, args=(connection.makefile("rb"), process), daemon=True).start()
            assert process.stdout
            with contextlib.suppress(ConnectionError):  # of a client that unmounts
                while data := os.read(process.stdout.fileno(), 1 << 18):
                    connection.sendall(data)
                    with self._lock:
                        self.totals["mb"] += len(data) / 1e6

    def _forward(self, source: Any, process: "subprocess.Popen[bytes]") -> None:
        """Hand requests on: a length of 4 bytes, a kind of 1 byte, and the rest."""
        writing = threading.Lock()

        def send(request: bytes) -> None:
            with writing, contextlib.suppress(OSError, ValueError):
                assert process.stdin
                process.stdin.write(request)
                process.stdin.flush()

        def send_later(request: bytes) -> None:
            while not os.path.exists(self._go):
                time.sleep(0.05)
            send(request)

        while head := source.read(5):
            request = head + source.read(int.from_bytes(head[:4], "big") - 1)
            if head[4] in METADATA:
                self._wait_for_turn()
            if head[4] == OPEN and self._hold and self._hold in request:
                threading.Thread(target=send_later, args=(request,), daemon=True).start()
            else:
                send(request)
        with writing, contextlib.suppress(OSError):
            assert process.stdin
            process.stdin.close()

    def _wait_for_turn(self) -> None:
        with self._lock:
            self.totals["metadata"] += 1
            if not self._requests:
                return
            self._next = max(self._next + 1 / self._requests, time.monotonic() - 0.01)
            pause = self._next - time.monotonic()
        time.sleep(max(0.0, pause))


if __name__ == "__main__":
    server = Server(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    threading.Thread(target=server.accept, args=(socket.create_server(("", PORT)),), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    print(json.dumps(server.totals), flush=True)
