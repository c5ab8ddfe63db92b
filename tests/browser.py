"""A headless Chromium, driven by the WebDriver protocol: plain JSON over HTTP to chromedriver.

Both are processes of ours, in the namespace of the node whose page is looked at, with a profile
that nobody else has; they end with the block.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agent.kernel.netns import inside, opened
from tests.spaces import eventually

PATIENCE = 60.0  # seconds for one command
STARTING = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

Json = dict[str, Any]


class Browser:
    """One session: a window with one tab."""

    def __init__(self, home: str, port: int) -> None:
        self._home, self._port, self._session = home, port, ""

    def start(self, profile: Path) -> None:
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": _found("chromium")}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._told("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def quit(self) -> None:
        if self._session:
            self._told("DELETE", self._session)

    # ------------------------------------------------------------------------------- what it does

    def open(self, url: str) -> None:
        self._do("/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What a script on the page returns."""
        return self._do("/execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name: str, **parameters: object) -> Any:
        """A command of the DevTools."""
        return self._do("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """As a screen of that size, with that taste."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        taste = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[taste])

    def allow_scripts(self, allowed: bool) -> None:
        self.command("Emulation.setScriptExecutionDisabled", value=not allowed)

    # -------------------------------------------------------------------------------- what it shows

    def text(self, selector: str = "body") -> str:
        """What a person reads there."""
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def shows(self, words: str, seconds: float = 10.0) -> bool:
        """Whether the page comes to say so."""
        return eventually(lambda: words in self.text(), seconds)

    def complaints(self) -> list[str]:
        """What the console has said since it was last asked, and what the policy forbade."""
        entries = self._do("/se/log", {"type": "browser"})
        return [f"{one['level']}: {one['message']}" for one in entries]

    def picture(self, path: Path) -> Path:
        """All of the page, also what is below the edge of the screen."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    # ----------------------------------------------------------------------------------- protocol

    def _do(self, path: str, body: Mapping[str, object]) -> Any:
        return self._told("POST", f"{self._session}{path}", body)

    def _told(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        try:
            with opened(self._home) as descriptor, inside(descriptor, self._home):
                connection.connect()
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


def _found(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        pytest.skip(f"needs the command {command} (Debian: chromium, chromium-driver)")
    return path


@contextmanager
def browsing(home: str, folder: Path) -> Iterator[Browser]:
    """A browser on that node, for as long as the block runs."""
    driver = _found("chromedriver")
    _found("chromium")
    folder.mkdir()
    log = folder / "driver.log"
    enter = ("nsenter", f"--net=/run/netns/{home}")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*enter, driver, "--port=0"],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
        )
    try:
        assert eventually(lambda: b"successfully on port " in log.read_bytes(), STARTING), (
            log.read_text()
        )
        port = log.read_text().rpartition("on port ")[2].split(".")[0].split()[0]
        browser = Browser(home, int(port))
        browser.start(folder / "profile")
        yield browser
        browser.quit()
    finally:
        process.kill()
        process.wait(PATIENCE)
        for pid in _using(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _using(folder: Path) -> list[int]:
    """The processes that name the folder: browsers that outlived their driver."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"--user-data-dir={folder}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found
