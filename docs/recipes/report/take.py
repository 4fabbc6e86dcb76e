"""Takes the pictures beside it with Debian's chromium, of a run that the kill-switch halted, with the cursor in a plot.

    .venv/bin/python docs/recipes/report/take.py [RUN]     # without RUN: of `diloco demo --hack`, three minutes

Needs Pillow, which tensorboard and trackio bring, to keep the files small.
"""

import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).parent
_COLOURS = 128  # of a picture
# By picture: width and height of the window, colours, what is at its top; where the cursor is in the first plot below
# that, as a share of its width, or None.
PICTURES = {
    "top": (1600, 900, "light", "h1", None),
    "wide": (1000, 760, "light", "#loss", 0.7),
    "dark": (1000, 760, "dark", "#guard", 0.7),
    "phone": (390, 800, "dark", "#loss", 0.7),
}


class Browser:
    """A headless chromium that is spoken to by its DevTools protocol over two pipes."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), write
        self._number, self.session = 0, ""

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command. Raises `RuntimeError` if the browser refuses it."""
        self._number += 1
        wanted = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            wanted["sessionId"] = self.session
        os.write(self._write, json.dumps(wanted).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        """Show the page at `url`; returns once it is loaded."""
        self("Page.enable")
        self("Page.navigate", url=url)
        while json.loads(self._message()).get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page, once it is settled."""
        done = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"]["description"])
        return done["result"].get("value")

    def _message(self) -> bytes:
        found = bytearray()
        while (byte := self._read.read(1)) not in (b"\0", b""):
            found += byte
        return bytes(found)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with one empty page, ended with the context. `folder`: for its profile."""
    (to_read, their_write), (their_read, to_write) = os.pipe(), os.pipe()
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    shell = f'exec 3<&{their_read} 4>&{their_write}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"],
        pass_fds=(their_read, their_write),
        stderr=subprocess.DEVNULL,
    )
    try:
        made = Browser(to_read, to_write)
        target = made("Target.createTarget", url="about:blank")["targetId"]
        made.session = made("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        yield made
    finally:
        process.terminate()
        process.wait()


def take(page: Path, target: Path, width: int, height: int, colours: str, heading: str, at: float | None) -> None:
    """Write a picture of `page`; the other arguments are a row of `PICTURES`."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as tell:
        tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])
        tell.open(page.as_uri())
        settled = "new Promise((done) => setTimeout(() => requestAnimationFrame(() => done(1)), 500))"
        tell.value(settled)
        tell.value(f"document.querySelector({heading!r}).scrollIntoView()")
        if at is not None:
            box = f"document.querySelector('{heading} .u-over').getBoundingClientRect()"
            left, top, across, down = tell.value(f"(({{x, y, width, height}}) => [x, y, width, height])({box})")
            tell("Input.dispatchMouseEvent", type="mouseMoved", x=left + at * across, y=top + down / 2)
        tell.value(settled)
        taken = Image.open(io.BytesIO(base64.b64decode(tell("Page.captureScreenshot", format="png")["data"])))
        taken.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
        print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def main(run: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        diloco = str(Path(sys.executable).with_name("diloco"))
        if run is None:
            run = f"{folder}/hacked"
            subprocess.run([diloco, "demo", "--hack", "--store", run], check=True)
        page = Path(folder) / "page.html"
        subprocess.run([diloco, "report", run, str(page)], check=True)
        for name, how in PICTURES.items():
            take(page, HERE / f"{name}.png", *how)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
