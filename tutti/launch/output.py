"""What ranks say, line by line: on the screen with their rank in front, and in files."""

import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, Literal

from tutti.errors import FolderError

Stream = Literal["stdout", "stderr"]
_LINE_END = re.compile(rb"\r\n|\n|\r")  # a progress bar ends its lines with a carriage return
_screen = threading.Lock()


class RankOutput:
    """Where the two streams of one rank go."""

    def __init__(self, rank: int, size: int, folder: str | None = None, timestamp: bool = False) -> None:
        self.rank = rank
        self._timestamp = timestamp
        self._files: dict[Stream, BinaryIO] = {}
        if folder is not None:
            own = Path(folder) / f"rank.{rank:0{len(str(max(size - 1, 0)))}d}"
            try:
                own.mkdir(parents=True, exist_ok=True)
                self._files = {"stdout": (own / "stdout").open("wb"), "stderr": (own / "stderr").open("wb")}
            except OSError as error:
                raise FolderError(
                    f"--output-filename {folder}: {error.strerror} ({error.filename}). Give a folder that can be made."
                ) from error

    def forward(self, source: BinaryIO, stream: Stream) -> None:
        """Pass on a stream until its end, a whole line at a time."""
        rest = b""
        while piece := os.read(source.fileno(), 65_536):
            rest += piece
            lines, start = [], 0
            for end in _LINE_END.finditer(rest):
                lines.append(rest[start : end.end()])
                start = end.end()
            rest = rest[start:]
            self._write(stream, lines)
        if rest:
            self._write(stream, [rest + b"\n"])
        source.close()
        if stream in self._files:
            self._files[stream].close()

    def _write(self, stream: Stream, lines: list[bytes]) -> None:
        when = time.asctime() if self._timestamp else ""
        prefix = f"{when}[{self.rank}]<{stream}>:".encode()
        try:
            if stream in self._files:
                self._files[stream].write(b"".join(lines))
                self._files[stream].flush()
            screen = (sys.stdout if stream == "stdout" else sys.stderr).buffer
            with _screen:
                screen.write(b"".join(prefix + line for line in lines))
                screen.flush()
        except (OSError, ValueError):
            pass  # nobody listens any more; the rank is not held up by it
