"""The server that the tests talk to: ``$ATTND_BINARY``, or the release build of this checkout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import attnd

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 30
LISTENING = re.compile(r"serving on ([\w.:\[\]]+:\d+), metrics on http://(\S+)/metrics")


def binary() -> Path:
    return Path(os.environ.get("ATTND_BINARY") or ROOT / "build/release/bin/attnd")


class Server:
    """A running attnd on a free port, or on the one that is named."""

    def __init__(self, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self.output: list[str] = []
        self._started = threading.Event()
        command = [str(binary()), f"--listen={listen}", "--metrics_listen=127.0.0.1:0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.target = self.metrics = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._started.wait(START_SECONDS) or not self.target:
            self.kill()
            raise RuntimeError(f"{command} did not start:\n{''.join(self.output)}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            match = LISTENING.search(line)
            if match:
                self.target, self.metrics = match.groups()
                self._started.set()
        self._started.set()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session", autouse=True)
def _server_is_built() -> None:
    if not binary().exists():
        pytest.fail(f"{binary()} is not built; build it, or name another with ATTND_BINARY")


@pytest.fixture(scope="session")
def server(_server_is_built: None) -> Iterator[Server]:
    """One for all tests that leave it as it was."""
    running = Server("--kv_cache_bytes=256MiB", "--compute_threads=2")
    yield running
    running.kill()


@pytest.fixture
def start_server(_server_is_built: None) -> Iterator[Callable[..., Server]]:
    """Starts servers of a test's own."""
    running: list[Server] = []

    def start(*flags: str, listen: str = "127.0.0.1:0") -> Server:
        server = Server("--kv_cache_bytes=64MiB", "--compute_threads=1", *flags, listen=listen)
        running.append(server)
        return server

    yield start
    for server in running:
        server.kill()


@pytest.fixture
def client(server: Server) -> Iterator[attnd.Client]:
    with attnd.Client(server.target) as connected:
        yield connected
