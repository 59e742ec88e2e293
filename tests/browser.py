"""A headless Chromium driven through W3C WebDriver over plain HTTP. Knows the protocol; knows no page."""

import base64
import http.client
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISSING = "" if shutil.which("chromedriver") and shutil.which("chromium") else "needs Debian's chromium and chromium-driver"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which WebDriver names an element


class Browser:
    """One window. Errors that the page throws or logs are kept by the driver; `errors` reads them."""

    def __init__(self, port: int, width: int, height: int, *, is_phone: bool) -> None:
        self._port = port
        options: dict[str, Any] = {
            "binary": shutil.which("chromium"),
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                f"--window-size={width},{height}",
            ],
        }
        if is_phone:
            metrics = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        self._session = "/session/" + self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Replace what a field holds, key by key."""
        element = self._find(selector)
        self._ask("POST", f"/element/{element}/clear", {})
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def tap(self, selector: str, x: float, y: float) -> None:
        """Click a point, in CSS pixels from an element's middle."""
        origin = {_ELEMENT: self._find(selector)}
        moves = [{"type": "pointerMove", "origin": origin, "x": round(x), "y": round(y)}, {"type": "pointerDown", "button": 0}]
        pointer = {"type": "pointer", "id": "finger", "actions": [*moves, {"type": "pointerUp", "button": 0}]}
        self._ask("POST", "/actions", {"actions": [pointer]})

    def until(self, script: str, timeout_s: float = 60.0) -> Any:
        """Wait until a script returns something true."""
        deadline = time.monotonic() + timeout_s
        while not (seen := self.run(script)):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {script}"
            time.sleep(0.1)
        return seen

    def screenshot(self, path: Path) -> None:
        """The whole page, not only what is in view."""
        size = self._ask("POST", "/goog/cdp/execute", {"cmd": "Page.getLayoutMetrics", "params": {}})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        shot = self._ask("POST", "/goog/cdp/execute", {"cmd": "Page.captureScreenshot", "params": options})
        path.write_bytes(base64.b64decode(shot["data"]))

    def errors(self) -> list[str]:
        """What the page has complained of since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._ask("DELETE", "")

    def _find(self, selector: str) -> str:
        found: str = self._ask("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        return found

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=90)
        connection.request(method, self._session + path, None if body is None else json.dumps(body))
        reply = json.loads(connection.getresponse().read())["value"]
        connection.close()
        if isinstance(reply, dict) and "error" in reply:
            raise AssertionError(f"{method} {path}: {reply['error']}: {reply['message'].splitlines()[0]}")
        return reply


@contextmanager
def browser(width: int = 1280, height: int = 900, *, is_phone: bool = False) -> Iterator[Browser]:
    """A window of its own driver, both gone at the end."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        started: Callable[[str], re.Match[str] | None] = re.compile(r"started successfully on port (\d+)").search
        port = next(int(match[1]) for line in driver.stdout if (match := started(line)))
        window = Browser(port, width, height, is_phone=is_phone)
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait(10)
