"""A headless Chromium for tests, spoken to over a pipe in the words of its DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import HUNG_SECONDS, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium fonts-dejavu-core"
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a browser, and all that it has complained about."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer, self._number, self._session = b"", 0, None
        self._seen: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, page: Path) -> None:
        """Open a file and wait until it has loaded."""
        self._seen.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda found: found.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """As a user who prefers light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def point_at(self, element: str) -> None:
        """Move the pointer over the middle of an element, which is told as an expression."""
        box = (
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); return e.getBoundingClientRect().toJSON(); }})({element})"
        )
        found = self.evaluate(box)
        x, y = found["x"] + found["width"] / 2, found["y"] + found["height"] / 2
        for away in (1, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + away, y=y)

    def wait_for(self, expression: str) -> Any:
        """The value of an expression as soon as it has one."""
        return wait_until(lambda: self.evaluate(expression), lambda: f"{expression} stays without a value")

    def screenshot(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def print(self, path: Path) -> None:
        found = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page since it was opened."""
        found = []
        for event in self._seen:
            method, values = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
                found.append(str(values["args"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(values["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """All addresses that the page has asked for."""
        found = [e["params"]["request"]["url"] for e in self._seen if e.get("method") == "Network.requestWillBeSent"]
        return [address for address in found if not address.startswith("data:")]

    def _until(self, is_it: Any) -> dict[str, Any]:
        while True:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                message = json.loads(line)
                self._seen.append(message)
                if is_it(message):
                    return message
            ready, _, _ = select.select([self._read], [], [], HUNG_SECONDS)
            assert ready, "the browser is silent"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, which has ended when the context has."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    line = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", line, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    browser = None
    try:
        browser = Browser(from_browser[0], to_browser[1])
        yield browser
    finally:
        if browser is not None:
            browser._session = None
            with contextlib.suppress(AssertionError, OSError):
                browser.call("Browser.close")
        try:
            process.wait(HUNG_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
        os.close(to_browser[1])
