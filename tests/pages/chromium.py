"""Chromium without a window, driven by its DevTools protocol over a pair of pipes: the standard library is enough."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

START_SECONDS = 60
ANSWER_SECONDS = 60


def find() -> str | None:
    """The browser to use: $ATTND_CHROMIUM, or what the system has."""
    named = os.environ.get("ATTND_CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab.

    Attributes:
        problems: what the console would show as an error, exceptions and refusals of the security policy among them.
        requests: the URLs that the page has asked for, itself first.
    """

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def look(self, width: int, height: int, dark: bool, phone: bool) -> None:
        """The window's size in CSS pixels and what the viewer prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def goto(self, url: str) -> None:
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise RuntimeError(f"{url}: {answer['errorText']}")
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20) -> Any:
        """Waits until the expression is true in the page; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(condition)):
            if time.monotonic() > end:
                raise AssertionError(
                    f"not so after {seconds} s: {condition}\n{self.evaluate('document.body.innerText')}"
                )
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        """The whole page, also what is below the window's edge."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(image))

    def close(self) -> None:
        self._browser.close_page(self._target, self._session)

    def take_event(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:1000])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(parameters["args"])[:1000])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")


class Browser:
    """Use as a context manager. Not for several threads."""

    def __init__(self, program: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="attnd-chromium-")
        self._numbers = itertools.count(1)
        self._pages: dict[str, Page] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer = b""
        commands, self._commands = os.pipe()
        self._messages, messages = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4. Its sandbox does not work for root.
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{commands} 4>&{messages}',
                "chromium",
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._home.name}",
                "about:blank",
            ],
            pass_fds=(commands, messages),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": self._home.name},
        )
        os.close(commands)
        os.close(messages)
        self.version = self.call("Browser.getVersion", seconds=START_SECONDS)["product"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._messages)
        self._home.cleanup()

    def open_page(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page.__new__(Page)
        self._pages[session] = page
        page.__init__(self, target, session)
        return page

    def close_page(self, target: str, session: str) -> None:
        del self._pages[session]
        self.call("Target.closeTarget", targetId=target)

    def call(
        self, method: str, session: str | None = None, seconds: float = ANSWER_SECONDS, **parameters: Any
    ) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + seconds
        while number not in self._answers:
            self._read(method, end)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self, method: str, end: float) -> None:
        if not select.select([self._messages], [], [], max(0, end - time.monotonic()))[0]:
            raise RuntimeError(f"Chromium did not answer {method}")
        data = os.read(self._messages, 1 << 20)
        if not data:
            raise RuntimeError(f"Chromium ended during {method}")
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.take_event(message["method"], message["params"])


if __name__ == "__main__":
    print(find() or sys.exit("no Chromium"))
