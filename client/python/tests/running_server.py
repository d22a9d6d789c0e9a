"""A server of the tests' own: ``$ATTND_BINARY``, or the release build of this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 60
LISTENING = re.compile(r"serving on (\S+:\d+)(?:, metrics on http://(\S+)/metrics)?")


def binary() -> Path:
    return Path(os.environ.get("ATTND_BINARY") or ROOT / "build/release/bin/attnd")


class Server:
    """A running attnd on a free port, or on the address that is named.

    Attributes:
        target, metrics: "host:port" of the two services, as its start-up line says.
        output: what it has printed.
    """

    def __init__(self, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self.output: list[str] = []
        self.target = self.metrics = ""
        self._started = threading.Event()
        command = [str(binary()), f"--listen={listen}", "--metrics_listen=127.0.0.1:0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        if not self._started.wait(START_SECONDS) or not self.target:
            self.kill()
            raise RuntimeError(f"{' '.join(command)} did not start:\n{''.join(self.output)}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            match = LISTENING.search(line)
            if match:
                self.target, self.metrics = match.groups("")
                self._started.set()
        self._started.set()

    def peak_memory(self) -> int:
        """The most bytes that were resident since it started."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
