"""Samples from a file server that all ranks share, for forecast_cluster.py; `python served_samples.py PORT` serves.

A rank asks for the bytes of its batch over TCP; the rate of the server's link limits all ranks together.
"""

import socket
import socketserver
import sys
from typing import Any

import torch

_BLOCK = bytes(1 << 16)
_NUMBER = 8  # bytes of the number that asks for so many bytes


class ServedSamples:
    """Random samples, each of which costs some bytes of the server."""

    num_classes = 10

    def __init__(self, split: str, server: str, sample_bytes: int, features: int = 256, samples: int = 65536) -> None:
        self.input_shape = (features,)
        host, _, port = server.partition(":")
        self._address = (host, int(port))
        self._bytes = sample_bytes if split == "train" else 0
        self._count = samples if split == "train" else 4

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: torch.Tensor, draws: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples, once their bytes have arrived."""
        if self._bytes:
            self._fetch(len(ids) * self._bytes)
        return torch.zeros(len(ids), *self.input_shape), torch.zeros(len(ids), dtype=torch.long)

    def _fetch(self, size: int) -> None:
        with socket.create_connection(self._address) as connection:
            connection.sendall(size.to_bytes(_NUMBER, "big"))
            while size > 0:
                size -= len(connection.recv(1 << 20))


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        size = int.from_bytes(self.request.recv(_NUMBER, socket.MSG_WAITALL), "big")
        while size > 0:
            self.request.sendall(_BLOCK[: min(size, len(_BLOCK))])
            size -= len(_BLOCK)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    with _Server(("", int(sys.argv[1])), _Handler) as server:
        print("serving", flush=True)
        server.serve_forever()
