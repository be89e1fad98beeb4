"""Chromium for tests: clicks and keys as of a person, and the page's text, requests and error messages.

    with Browser(profile) as browser, browser.tab() as tab:
        tab.open(url)
        tab.click("#go")

It uses the DevTools protocol over a pipe (`--remote-debugging-pipe`), so that no port is open:
https://chromedevtools.github.io/devtools-protocol/
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-proxy-server",
    "--remote-debugging-pipe", "--lang=en-US",
)  # fmt: skip
STARTER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that turns into the browser, which reads from descriptor 3 and writes to 4."""
PATIENCE_SECONDS = 60.0
CONTROL = 2
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}


class BrowserError(Exception):
    """The browser failed to do what the message says."""


class Browser:
    """A browser process with its own profile. Tabs share no cookies, storage or cache."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        starter = [sys.executable, "-ISc", STARTER, str(to_read), str(to_write)]
        command = [*starter, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), stdout=quiet, stderr=quiet)
        os.close(to_read)
        os.close(to_write)
        self._last = 0
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(timeout=PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def call(self, method: str, *, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result. Raises BrowserError."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while number not in self._answers:
            self.listen(deadline - time.monotonic())
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        found: dict[str, Any] = answer["result"]
        return found

    def listen(self, seconds: float) -> None:
        """Read the next messages of the browser: answers, and events for tabs."""
        if not select.select([self._in], [], [], max(seconds, 0))[0]:
            raise BrowserError("the browser says nothing")
        said = os.read(self._in, 2**20)
        if not said:
            raise BrowserError("the browser has ended")
        *messages, self._rest = (self._rest + said).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                tab.hear(message["method"], message["params"])

    @contextmanager
    def tab(self, *, width: int = 1280, height: int = 800) -> "Iterator[Tab]":
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        try:
            yield tab
        finally:
            del self._tabs[session]
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """A page. `asked`: every URL that it requested. `complaints`: messages of console, content policy and scripts."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.asked: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **parameters)

    def hear(self, event: str, given: dict[str, Any]) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.asked.append(given["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(given["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(given["args"]))
            case "Log.entryAdded" if given["entry"]["source"] != "network":  # HTTP errors are logged, too
                self.complaints.append(given["entry"]["text"])

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def open(self, url: str, *, languages: str = "en") -> None:
        self.call("Network.setExtraHTTPHeaders", headers={"Accept-Language": languages})
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        self.call("Page.bringToFront")

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression of JavaScript is true, and return its value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                raise BrowserError(f"never true: {expression}; the page: {self.text('body')!r}")
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        found: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def choose(self, selector: str, value: str) -> None:
        """Choose a value in a list, as a person would."""
        self.value(
            f"(() => {{ const list = document.querySelector({json.dumps(selector)}); list.value = {json.dumps(value)};"
            "list.dispatchEvent(new Event('change', { bubbles: true })); })()"
        )

    def click(self, selector: str) -> None:
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _middle(self, selector: str) -> tuple[float, float]:
        x, y = self.until(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); if (!found) return null;"
            "found.scrollIntoView({ block: 'nearest' }); const box = found.getClientRects()[0];"
            "return box && [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return x, y

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, modifiers: int = 0) -> None:
        parameters = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" and not modifiers else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **parameters, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)
