"""Download of public datasets with checksums; without internet the error says how to copy the files."""

import hashlib
import http.client
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import ConfigError, DataError, nearest


@dataclass(frozen=True)
class DownloadSource:
    """The files of a dataset with their MD5 sums, and the mirrors that serve them."""

    mirrors: tuple[str, ...]
    files: dict[str, str]


SOURCES = {
    "mnist": DownloadSource(
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        files={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "cifar10": DownloadSource(
        mirrors=("https://www.cs.toronto.edu/~kriz",),
        files={"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
    ),
}
Report = Callable[[str, int, int], None]  # file, bytes so far, bytes in all (0: unknown)


def get(name: str, folder: Path, mirror: str | None = None, report: Report = lambda *_: None) -> list[Path]:
    """Download the files of a dataset into a folder; files with the right checksum are kept."""
    if name not in SOURCES:
        raise ConfigError(f"data {name!r} cannot be fetched: expected {', '.join(SOURCES)}.{nearest(name, SOURCES)}")
    source = SOURCES[name]
    mirrors = (mirror.rstrip("/"),) if mirror else source.mirrors
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}. Choose another folder with --out.") from error
    return [_get_file(folder / file, md5, mirrors, report) for file, md5 in source.files.items()]


def _get_file(path: Path, md5: str, mirrors: tuple[str, ...], report: Report) -> Path:
    if path.exists() and _md5(path) == md5:
        report(path.name, path.stat().st_size, path.stat().st_size)
        return path
    tried = []
    for mirror in mirrors:
        try:
            _fetch(f"{mirror}/{path.name}", path, md5, report)
            return path
        except (OSError, http.client.HTTPException, ValueError) as error:
            tried.append(f"{mirror}: {error}")
    raise DataError(
        f"{path.name} could not be fetched ({'; '.join(tried)}). Without internet, fetch it elsewhere, for example\n"
        f"  curl -O {mirrors[0]}/{path.name}\n"
        f"and copy it to {path.parent.resolve()}/ (expected MD5 {md5})."
    )


def _fetch(url: str, path: Path, md5: str, report: Report) -> None:
    temporary = path.with_suffix(".part")
    try:
        with urllib.request.urlopen(url, timeout=30) as answer, open(temporary, "wb") as file:
            total = int(answer.headers.get("Content-Length") or 0)
            while chunk := answer.read(1 << 16):
                file.write(chunk)
                report(path.name, file.tell(), total)
        if (found := _md5(temporary)) != md5:
            raise ValueError(f"wrong content: MD5 {found}, expected {md5}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
