"""Downloads from a real server: checksums, no second download, and instructions without internet."""

import dataclasses
import hashlib
import io
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import numpy as np
import pytest

from tutti import units
from tutti.data.download import SOURCES, DownloadSource, get
from tutti.errors import ConfigError, DataError

CONTENT = {"images.gz": b"pixels" * 40_000, "labels.gz": b"digits"}
SUMS = {name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()}


@dataclass
class Site:
    """A web server that remembers what it was asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: dict(CONTENT))
    asked: list[str] = field(default_factory=list)
    answer: Callable[[BaseHTTPRequestHandler, bytes], None] | None = None
    version: str = '"one"'
    claimed: int | None = None  # the length that is told, where it is not that of the file


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server on a free port, and a source of two small files on it."""
    found = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            found.asked.append(self.path)
            if name not in found.files:
                self.send_error(404)
                return
            if found.answer:
                found.answer(self, found.files[name])
                return
            begin = self.first_byte()
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(found.files[name]) - begin))
            self.end_headers()
            self.wfile.write(found.files[name][begin:])

        def do_HEAD(self) -> None:
            name = self.path.rpartition("/")[2]
            if name not in found.files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(found.claimed or len(found.files[name])))
            self.send_header("ETag", found.version)
            self.end_headers()

        def first_byte(self) -> int:
            if self.headers.get("If-Range") != found.version:
                return 0
            found.asked[-1] += " " + self.headers["Range"]
            return int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setitem(SOURCES, "small", DownloadSource((f"{found.url}/data",), SUMS))
        monkeypatch.setitem(SOURCES, "nbody", dataclasses.replace(SOURCES["nbody"], mirrors=(f"{found.url}/data",)))
        yield found
        server.shutdown()
        thread.join()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def refusal(folder: Path, mirror: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        get("small", folder, mirror)
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_fetched_and_progress_is_told(site: Site, tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    folder = tmp_path / "new" / "folder"
    paths = get("small", folder, report=lambda name, done, total: told.setdefault(name, []).append((done, total)))
    assert paths == [folder / name for name in CONTENT]
    assert contents(folder) == CONTENT
    assert site.asked == ["/data/images.gz", "/data/labels.gz"]
    assert len(told["images.gz"]) > 1
    for name, steps in told.items():
        assert steps == sorted(steps)
        assert steps[-1] == (len(CONTENT[name]), len(CONTENT[name]))


def test_a_file_that_is_there_and_right_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    get("small", tmp_path)
    site.asked.clear()
    told = []
    get("small", tmp_path, report=lambda *progress: told.append(progress))
    assert site.asked == []
    assert told == [(name, len(content), len(content)) for name, content in CONTENT.items()]


def test_a_file_that_is_there_but_wrong_is_replaced(site: Site, tmp_path: Path) -> None:
    get("small", tmp_path)
    site.asked.clear()
    (tmp_path / "labels.gz").write_bytes(b"half")
    get("small", tmp_path)
    assert site.asked == ["/data/labels.gz"]
    assert contents(tmp_path) == CONTENT


def test_a_file_with_the_wrong_sum_is_refused_and_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.files["images.gz"] = b"forged"
    message = refusal(tmp_path)
    found = hashlib.md5(b"forged").hexdigest()
    assert f"wrong content: MD5 {found}, expected {SUMS['images.gz']}" in message
    assert contents(tmp_path) == {}


def test_a_file_that_cannot_be_replaced_is_kept_as_it_was(site: Site, tmp_path: Path) -> None:
    (tmp_path / "images.gz").write_bytes(b"mine")
    site.files["images.gz"] = b"forged"
    refusal(tmp_path)
    assert contents(tmp_path) == {"images.gz": b"mine"}


def short(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[:100])


def chunked_and_short(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(b"ff\r\n" + content[:100])


def no_http(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.wfile.write(b"220 this is a mail server\r\n")


@pytest.mark.parametrize("answer", [short, chunked_and_short, no_http])
def test_an_answer_that_is_broken_is_refused_and_leaves_nothing(
    site: Site, tmp_path: Path, answer: Callable[[BaseHTTPRequestHandler, bytes], None]
) -> None:
    site.answer = answer
    assert refusal(tmp_path).startswith("images.gz could not be fetched (")
    assert contents(tmp_path) == {}


def test_a_dead_server_is_refused_with_how_to_copy_by_hand(nobody: str, site: Site, tmp_path: Path) -> None:
    message = refusal(tmp_path, nobody)
    assert message.startswith(f"images.gz could not be fetched ({nobody}: ")
    assert "Connection refused" in message
    assert message.endswith(
        "Without internet, fetch it elsewhere, for example\n"
        f"  curl -O {nobody}/images.gz\n"
        f"and copy it to {tmp_path}/ (expected MD5 {SUMS['images.gz']})."
    )
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    assert get("small", tmp_path, nobody) == [tmp_path / name for name in CONTENT]


def test_a_file_that_the_server_does_not_have_is_refused(site: Site, tmp_path: Path) -> None:
    del site.files["labels.gz"]
    assert re.match(
        r"labels\.gz could not be fetched \(http://\S+/data: HTTP Error 404: Not Found\)", refusal(tmp_path)
    )
    assert contents(tmp_path) == {"images.gz": CONTENT["images.gz"]}


def test_the_next_mirror_is_tried_and_all_are_named_when_none_answers(
    nobody: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "small", DownloadSource((nobody, f"{site.url}/absent", f"{site.url}/data"), SUMS))
    get("small", tmp_path)
    assert contents(tmp_path) == CONTENT
    monkeypatch.setitem(SOURCES, "small", DownloadSource((nobody, "no-address"), SUMS))
    message = refusal(tmp_path / "other")
    assert nobody in message and "no-address: unknown url type" in message


def test_a_mirror_of_ones_own_replaces_the_others(site: Site, tmp_path: Path) -> None:
    get("small", tmp_path, f"{site.url}/mine/")
    assert site.asked == ["/mine/images.gz", "/mine/labels.gz"]


def test_a_name_that_cannot_be_fetched_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data 'mnits' cannot be fetched: expected mnist.* Did you mean 'mnist'\?$"):
        get("mnits", tmp_path)


def test_a_file_in_the_way_of_the_folder_is_refused(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refusal(folder)
        assert message.startswith(f"{folder} cannot be created: ")
        assert message.endswith("Choose another folder with --out.")


PORTAL = ("downsamp_2048crop_train.h5", "downsamp_1024crop_valid.h5")


@pytest.fixture
def boxes(site: Site) -> dict[str, bytes]:
    """Two small boxes, under the names of the portal."""
    found = {}
    for seed, name in enumerate(PORTAL):
        file = io.BytesIO()
        with h5py.File(file, "w") as box:
            for field, channels in (("Nbody", 4), ("Hydro", 5)):
                box[field] = np.random.default_rng(seed).normal(size=[channels, 16, 16, 16]).astype("float32")
        found[name] = file.getvalue()
    site.files.update(found)
    return found


def half(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[:100_000])


def refused_box(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        get("nbody", folder)
    return str(caught.value)


def test_boxes_of_the_portal_get_the_names_of_the_recipe(site: Site, boxes: dict[str, bytes], tmp_path: Path) -> None:
    assert get("nbody", tmp_path) == [tmp_path / "train.h5", tmp_path / "valid.h5"]
    assert contents(tmp_path) == {"train.h5": boxes[PORTAL[0]], "valid.h5": boxes[PORTAL[1]]}
    site.asked.clear()
    get("nbody", tmp_path)
    assert site.asked == []


def test_an_interrupted_box_is_continued(site: Site, boxes: dict[str, bytes], tmp_path: Path) -> None:
    site.answer = half
    size = units.size(len(boxes[PORTAL[0]]))
    assert f"97.7 KiB of {size} arrived; the same command fetches the rest" in refused_box(tmp_path)
    (part,) = tmp_path.iterdir()
    assert part.read_bytes() == boxes[PORTAL[0]][:100_000]
    site.answer = None
    site.asked.clear()
    get("nbody", tmp_path)
    assert site.asked == [f"/data/{PORTAL[0]} bytes=100000-", f"/data/{PORTAL[1]}"]
    assert contents(tmp_path) == {"train.h5": boxes[PORTAL[0]], "valid.h5": boxes[PORTAL[1]]}


def test_an_interrupted_box_that_has_changed_is_fetched_anew(
    site: Site, boxes: dict[str, bytes], tmp_path: Path
) -> None:
    site.answer = half
    refused_box(tmp_path)
    site.answer, site.version = None, '"two"'
    site.files[PORTAL[0]] = boxes[PORTAL[1]]
    site.asked.clear()
    get("nbody", tmp_path)
    assert site.asked == [f"/data/{PORTAL[0]}", f"/data/{PORTAL[1]}"]
    assert contents(tmp_path) == {"train.h5": boxes[PORTAL[1]], "valid.h5": boxes[PORTAL[1]]}


def test_what_is_no_box_is_refused_and_leaves_nothing(site: Site, boxes: dict[str, bytes], tmp_path: Path) -> None:
    site.files[PORTAL[0]] = b"<html>The portal has moved.</html>"
    assert "wrong content: " in (message := refused_box(tmp_path))
    assert "cannot be opened as an HDF5 file" in message
    assert contents(tmp_path) == {}


def test_a_box_that_the_portal_does_not_have_is_explained(site: Site, tmp_path: Path) -> None:
    message = refused_box(tmp_path)
    assert message.startswith(f"{PORTAL[0]} could not be fetched ({site.url}/data: HTTP Error 404: Not Found)")
    assert f"curl -O {site.url}/data/{PORTAL[0]}\nand copy it to {tmp_path}/ as train.h5. If the portal" in message
    assert message.endswith("Or make boxes of the same form with: tutti data make nbody.")


def test_a_box_that_the_disk_has_no_space_for_is_refused_first(
    site: Site, boxes: dict[str, bytes], tmp_path: Path
) -> None:
    site.claimed = 1 << 60
    assert re.search(
        r"train\.h5 needs 1,048,576 TiB, and .* are free there\. Choose another folder", refused_box(tmp_path)
    )
    assert site.asked == [] and contents(tmp_path) == {}
