"""Download of public datasets with checksums; without internet the error says how to copy the files."""

import hashlib
import http.client
import shutil
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti import units
from tutti.errors import ConfigError, DataError, nearest

_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class DownloadSource:
    """The files of a dataset with their MD5 sums, and the mirrors that serve them.

    A file with an empty sum is a box of fields, which is opened as a check; its download is continued when it was
    interrupted.
    """

    mirrors: tuple[str, ...]
    files: dict[str, str]
    saved_as: dict[str, str] = field(default_factory=dict)  # names here, where they differ from those of the mirrors
    otherwise: str = ""  # what to do where files cannot be fetched


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
    "nbody": DownloadSource(  # 36 and 4.5 GiB; the portal publishes no sums
        mirrors=("https://portal.nersc.gov/project/dasrepo/pharring",),
        files={"downsamp_2048crop_train.h5": "", "downsamp_1024crop_valid.h5": ""},
        saved_as={"downsamp_2048crop_train.h5": "train.h5", "downsamp_1024crop_valid.h5": "valid.h5"},
        otherwise=(
            "If the portal has changed its names, look for the two boxes of the Perlmutter training at "
            "https://portal.nersc.gov/project/dasrepo/pharring/. Or make boxes of the same form with: "
            "tutti data make nbody."
        ),
    ),
}
Report = Callable[[str, int, int], None]  # file, bytes so far, bytes in all (0: unknown)


def get(name: str, folder: Path, mirror: str | None = None, report: Report = lambda *_: None) -> list[Path]:
    """Download the files of a dataset into a folder; files that are there and right are kept."""
    if name not in SOURCES:
        raise ConfigError(f"data {name!r} cannot be fetched: expected {', '.join(SOURCES)}.{nearest(name, SOURCES)}")
    source = SOURCES[name]
    mirrors = (mirror.rstrip("/"),) if mirror else source.mirrors
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be created: {error.strerror}. Choose another folder with --out.") from error
    return [_get_file(folder, file, source, mirrors, report) for file in source.files]


def _get_file(folder: Path, file: str, source: DownloadSource, mirrors: tuple[str, ...], report: Report) -> Path:
    md5, path = source.files[file], folder / source.saved_as.get(file, file)
    if path.exists() and not _find_problem(path, md5):
        report(path.name, path.stat().st_size, path.stat().st_size)
        return path
    tried = []
    for mirror in mirrors:
        try:
            (_fetch if md5 else _fetch_in_parts)(f"{mirror}/{file}", path, md5, report)
            return path
        except (OSError, http.client.HTTPException, ValueError) as error:
            tried.append(f"{mirror}: {error}")
    renamed = f" as {path.name}" if path.name != file else ""
    expected = f" (expected MD5 {md5})" if md5 else ""
    raise DataError(
        f"{file} could not be fetched ({'; '.join(tried)}). Without internet, fetch it elsewhere, for example\n"
        f"  curl -O {mirrors[0]}/{file}\n"
        f"and copy it to {path.parent.resolve()}/{renamed}{expected}. {source.otherwise}".rstrip()
    )


def _fetch(url: str, path: Path, md5: str, report: Report) -> None:
    temporary = path.with_suffix(".part")
    try:
        with _ask(url) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            _copy(answer, temporary, lambda done: report(path.name, done, total))
        if problem := _find_problem(temporary, md5):
            raise ValueError(f"wrong content: {problem}")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _fetch_in_parts(url: str, path: Path, md5: str, report: Report) -> None:
    """Fetch a large file; what has arrived stays until the rest does, as long as the server has the same version."""
    with _ask(url, method="HEAD") as answer:
        total = int(answer.headers.get("Content-Length") or 0)
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    mark = hashlib.md5(f"{url} {version}".encode()).hexdigest()[:8]
    temporary = path.with_name(f"{path.name}.{mark}.part")
    for other in set(path.parent.glob(f"{path.name}.*.part")) - {temporary}:
        other.unlink()
    begun = temporary.stat().st_size if version and temporary.exists() else 0
    _check_space(path, total - begun)
    if not total or begun < total:
        headers = {"Range": f"bytes={begun}-", "If-Range": version} if begun else {}
        with _ask(url, headers=headers) as answer:
            _copy(answer, temporary, lambda done: report(path.name, done, total))
    if (arrived := temporary.stat().st_size) < total:
        raise OSError(f"{units.size(arrived)} of {units.size(total)} arrived; the same command fetches the rest")
    if problem := _find_problem(temporary, md5):
        temporary.unlink()
        raise ValueError(f"wrong content: {problem}")
    temporary.replace(path)


def _ask(url: str, **options: Any) -> http.client.HTTPResponse:
    return urllib.request.urlopen(urllib.request.Request(url, **options), timeout=_TIMEOUT_SECONDS)


def _copy(answer: http.client.HTTPResponse, path: Path, report: Callable[[int], None]) -> None:
    """Write an answer to a file, at its end if the answer is the rest of it."""
    with open(path, "ab" if answer.status == http.HTTPStatus.PARTIAL_CONTENT else "wb") as file:
        while chunk := answer.read(1 << 16):
            file.write(chunk)
            report(file.tell())


def _check_space(path: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(path.parent).free):
        found = f"{path} needs {units.size(needed)}, and {units.size(free)} are free there"
        raise DataError(f"{found}. Choose another folder with --out.")


def _find_problem(path: Path, md5: str) -> str:
    """What is wrong with a file, or nothing: its sum or, without one, its fields."""
    if not md5:
        from tutti.data.nbody.box import open_box

        try:
            open_box(path, crop=1)
        except DataError as error:
            return str(error)
        return ""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    return "" if found == md5 else f"MD5 {found}, expected {md5}"
