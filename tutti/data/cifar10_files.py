"""Where the files of CIFAR-10 are: batches or class folders of images, in a folder or in a tar archive."""

import tarfile
from pathlib import Path, PurePosixPath

from tutti.errors import DataError

BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "valid": ("test_batch",)}
TREES = {"train": ("train",), "valid": ("test", "valid", "validation")}
ARCHIVES = (".tar.xz", ".tar.gz", ".tgz", ".tar")
BATCH_FILES = frozenset(f"{name}{ending}" for names in BATCHES.values() for name in names for ending in (".bin", ""))

AGAIN = "Fetch or copy it again."
EXPECTED = (
    "Expected data_batch_1.bin ... test_batch.bin (the binary version), data_batch_1 ... test_batch (the Python "
    "version), folders train/CLASS and test/CLASS of .jpg or .png files, or one archive of these "
    f"({', '.join(ARCHIVES)}). Set data.path=FOLDER_OR_ARCHIVE, or TUTTI_DATA to the folder "
    "that holds cifar10/, or fetch it with: tutti data get cifar10."
)

_LARGEST = 1 << 26  # bytes of a batch or an image
_BATCH_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
_TREE_FOLDERS = frozenset(tree for trees in TREES.values() for tree in trees)

Files = dict[str, Path | bytes | None]  # name below the root -> where the file is, or its content; None: a folder


def find(path: Path) -> Path:
    """The folder or archive that a path stands for: itself, the one archive in it, or one of its name beside it."""
    if path.is_file() or any((path / name).exists() for name in (*_BATCH_FOLDERS, *BATCH_FILES, *_TREE_FOLDERS)):
        return path
    found = [file for file in sorted(_visible(path)) if file.name.endswith(ARCHIVES)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise DataError(f"{path} holds {len(found)} archives ({names}): expected one. Set data.path to one of them.")
    beside = (path.parent / f"{path.name}{middle}{ending}" for middle in ("", "-jpeg") for ending in ARCHIVES)
    for archive in (*found, *beside):
        if archive.is_file():
            return archive
    raise DataError(f"CIFAR-10 is not at {path}. {EXPECTED}")


def list_folder(folder: Path) -> Files:
    """The batch files, or the class folders with their files; empty where there is neither."""
    batches = [folder / below / name for below in ("", *_BATCH_FOLDERS) for name in BATCH_FILES]
    if files := {path.name: path for path in batches if path.is_file()}:
        return dict(files)
    listed: Files = {}
    for tree in _TREE_FOLDERS:
        for class_folder in _visible(folder / tree):
            if class_folder.is_dir():
                prefix = f"{tree}/{class_folder.name}"
                listed |= {prefix: None} | {f"{prefix}/{file.name}": file for file in _visible(class_folder)}
    return listed


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def list_archive(path: Path) -> Files:
    """What `list_folder` lists, at any depth of an archive and with contents, in one pass through it."""
    files: Files = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if name := _known_name(member):
                    if member.size > _LARGEST:
                        raise tarfile.ReadError(f"{member.name} has {member.size} bytes, more than a file of CIFAR-10")
                    content = archive.extractfile(member)
                    files[name] = content.read() if content else None
            _check_end(archive)
    except Exception as error:  # every compression has errors of its own
        reason = str(error).partition(":")[0]
        raise DataError(f"{path} cannot be read as a tar archive (plain, gzip or xz): {reason}. {AGAIN}") from error
    return files


def _known_name(member: tarfile.TarInfo) -> str:
    """The name of a batch file, a class folder or a file in one; empty for all else."""
    path = PurePosixPath(member.name)
    if member.isreg() and path.name in BATCH_FILES:
        return path.name
    depth = 3 if member.isreg() else 2 if member.isdir() else len(path.parts) + 1
    parts = path.parts[-depth:]
    known = len(parts) == depth and parts[0] in _TREE_FOLDERS and not any(part.startswith(".") for part in parts)
    return "/".join(parts) if known else ""


def _check_end(archive: tarfile.TarFile) -> None:
    """Refuse what tarfile takes for the end although it is none, and have the checksums of the rest looked at."""
    assert archive.fileobj
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # the second of the two that end it
        raise tarfile.ReadError("it ends without an end mark, so it is truncated or damaged")
    while archive.fileobj.read(1 << 20):
        pass


def content_of(files: Files, name: str, source: Path) -> bytes:
    """The bytes of a file, which must be there."""
    content = files.get(name)
    if content is None:
        raise DataError(f"{source} lacks {name}: it holds {', '.join(sorted(files.keys() & BATCH_FILES))}. {AGAIN}")
    return content if isinstance(content, bytes) else content.read_bytes()


def place_of(files: Files, name: str, source: Path) -> str:
    """Where a file is, as a message says it."""
    content = files[name]
    return str(content) if isinstance(content, Path) else f"{name} in {source}"
