"""Archives of an environment in a folder that all nodes share, each under a digest of what is in it."""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import platform
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import LaunchError
from tutti.launch.cluster.staging.environment import CACHED, Environment, EnvironmentLayer, File, files_of
from tutti.runs.files import read_dataclass, sync_path, write_dataclass

_DIGITS = 16
_FORMAT = "1"  # of archives: another one packs everything anew
_UNUSED_SECONDS = 30 * 86400  # after which an archive is removed
_LOCK_SECONDS, _PAUSE_SECONDS = 1800.0, 0.5  # while another submission packs the same layer
_BLOCK = 4096  # of a local disk: what a small file takes there
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True)
class Archive:
    """A packed layer."""

    name: str  # of its file, in the folder of archives
    sha256: str
    bytes: int  # of the archive
    files: int
    disk_bytes: int  # that its files take when they are unpacked


@dataclass(frozen=True)
class Packed:
    """An environment whose archives are there."""

    environment: Environment
    digest: str
    folder: Path
    archives: tuple[Archive, ...]  # one for each layer of the environment
    packed_now: tuple[str, ...] = ()  # layers that no earlier submission had packed


def digest_of(layer: EnvironmentLayer, files: Sequence[File]) -> str:
    """A digest of names, sizes and times; not of compiled modules, which Python writes when it imports."""
    digest = hashlib.blake2b(f"{_FORMAT} {layer.only is None}".encode())
    for file in files:
        if f"/{CACHED}/" not in f"/{file.name}":
            digest.update(f"{file.name}\0{file.bytes}\0{file.modified}\0{file.link}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:_DIGITS]


def pack(environment: Environment, folder: Path, tell: Callable[[str], None] = lambda text: None) -> Packed:
    """Pack the layers that have changed into a folder, and return all archives of the environment."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [_pack_layer(layer, folder, tell) for layer in environment.layers]
        _remove_unused(folder, keep={archive.name for archive, _ in found})
    except OSError as error:
        raise LaunchError(
            f"the Python environment cannot be packed into {folder}: {error.strerror or error}. Free space there, "
            "choose another folder with out=FOLDER, or submit without --stage-environment."
        ) from error
    digest = hashlib.blake2b(repr((environment.python, environment.before, environment.after)).encode())
    for layer, (archive, _) in zip(environment.layers, found, strict=True):
        digest.update(f"{layer.name} {archive.name}\n".encode())
    new = tuple(layer.name for layer, (_, is_new) in zip(environment.layers, found, strict=True) if is_new)
    return Packed(environment, digest.hexdigest()[:_DIGITS], folder, tuple(each for each, _ in found), new)


def _pack_layer(layer: EnvironmentLayer, folder: Path, tell: Callable[[str], None]) -> tuple[Archive, bool]:
    """Return the archive of a layer, and whether it was packed by this call."""
    files = list(files_of(layer))
    digest = digest_of(layer, files)
    name = re.sub(r"[^\w.-]", "-", layer.source.name).lstrip(".") + f"-{digest}.tar"
    path = folder / name
    if (known := _read(path)) is not None:
        return known, False
    with _locked(folder / f".{name}.lock") as is_alone:
        if (known := _read(path)) is not None:  # another submission has packed it meanwhile
            return known, False
        tell(f"packing {layer.source} ({len(files):,} files) ...")
        if is_alone:
            _remove_all(folder.glob(f".{name}.*.part"))  # of packs that were killed
        aside = folder / f".{name}.{platform.node()}-{os.getpid()}.part"
        try:
            sha256 = _write(layer, files, aside)
            size = aside.stat().st_size
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        disk = sum(-(-file.bytes // _BLOCK) * _BLOCK for file in files)
        archive = Archive(name, sha256, size, len(files), disk)
        write_dataclass(_notes(path), archive)
    return archive, True


def _notes(path: Path) -> Path:
    """The file beside an archive that says what is in it; an archive without one is incomplete."""
    return path.with_name(f"{path.name}.json")


def _read(path: Path) -> Archive | None:
    """A complete archive, marked as used today."""
    try:
        archive = read_dataclass(_notes(path), Archive)
        if path.stat().st_size != archive.bytes:
            return None
        os.utime(path)
    except (OSError, ValueError):
        return None
    return archive


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock, if the file system has locks; where it has none, two may pack and the later one replaces."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    is_alone = True
    try:
        try:
            _wait_for_lock(handle, path)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_alone = False
        yield is_alone
        path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, path: Path) -> None:
    """Wait until no other submission packs the same layer."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise LaunchError(
                    f"another submission has held {path} for {_LOCK_SECONDS / 60:g} min: expected that it packs the "
                    "environment in less. End it, or submit without --stage-environment."
                ) from None
        time.sleep(_PAUSE_SECONDS)


class _Summed(io.RawIOBase):
    """A file that sums what is written to it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        self.sum = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.sum.update(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _write(layer: EnvironmentLayer, files: Sequence[File], path: Path) -> str:
    """Write a tar archive; return its SHA-256."""
    with contextlib.closing(_Summed(path)) as out:
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:
            for file in files:
                _add(tar, file)
        digest = out.sum.hexdigest()
    sync_path(path)
    return digest


def _add(tar: tarfile.TarFile, file: File) -> None:
    entry = tarfile.TarInfo(file.name)
    if file.link is not None:
        entry.type, entry.linkname = tarfile.SYMTYPE, file.link
        tar.addfile(entry)
        return
    with open(file.path, "rb") as source:
        facts = os.fstat(source.fileno())
        entry.mode, entry.mtime, entry.size = facts.st_mode & 0o755 | 0o600, facts.st_mtime, facts.st_size
        if file.name.endswith(".pth"):
            content = _without_paths(source.read())
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        else:
            tar.addfile(entry, source)


def _without_paths(content: bytes) -> bytes:
    """What a .pth file runs, without the folders it adds: those are layers of the copy."""
    lines = content.decode(errors="surrogateescape").splitlines()
    kept = [line for line in lines if line.startswith(("import ", "import\t")) and "__editable__" not in line]
    return "".join(f"{line}\n" for line in kept).encode(errors="surrogateescape")


def _remove_unused(folder: Path, keep: set[str]) -> None:
    """Remove archives that no submission has used for a long time."""
    oldest = time.time() - _UNUSED_SECONDS
    old = [path for path in folder.glob("*.tar") if path.name not in keep and path.stat().st_mtime < oldest]
    _remove_all([*map(_notes, old), *old])


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
