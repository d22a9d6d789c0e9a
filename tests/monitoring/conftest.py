"""attnd, load on it, and Prometheus on both, for the tests of what an operator watches."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import attnd
import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "client/python/tests")]

from prometheus import Prometheus  # noqa: E402
from running_server import Server, binary  # noqa: E402

# Small steps, unary and streamed, at a rate that half a processor can serve.
LOAD = ["--model=smollm2-135m", "--layers=1", "--rate=5", "--prefill_tokens=64", "--decode_tokens=64",
        "--decode_interval=10ms", "--duration=10m"]



class Returning:
    """Clients that come back now and then: more of them than the cache holds, so that each is on disk meanwhile."""

    SESSIONS, TOKENS, PAUSE_SECONDS = 40, 256, 0.4  # 20 MiB in all

    def __init__(self, target: str) -> None:
        self.error: Exception | None = None
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with attnd.Client(self._target) as client, contextlib.ExitStack() as stack:
                sessions = [
                    stack.enter_context(client.create_session(num_layers=1, num_q_heads=4, num_kv_heads=4, head_dim=64))
                    for _ in range(self.SESSIONS)
                ]
                for number in itertools.count():
                    session, tokens = sessions[number % self.SESSIONS], self.TOKENS if number < self.SESSIONS else 1
                    session.step(0, *(np.full((tokens, 4, 64), number % self.SESSIONS, np.float32) for _ in range(3)))
                    if self._stop.wait(self.PAUSE_SECONDS if number >= self.SESSIONS else 0):
                        return
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    spill_dir = tmp_path_factory.mktemp("sessions") / "spill"
    running = Server("--kv_cache_bytes=16MiB", "--compute_threads=1", "--eviction=lru", f"--spill_dir={spill_dir}")
    yield running
    running.kill()


@pytest.fixture(scope="session")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = Prometheus(server.metrics, tmp_path_factory.mktemp("prometheus"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def load(server: Server) -> Iterator[Returning]:
    """Prefills and decodes, unary and streamed, and clients that come back, until the tests are over."""
    program = str(binary().parent / "attnload")
    running = [subprocess.Popen([program, *LOAD, f"--target={server.target}", f"--streams={streams}"],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for streams in (0, 1)]
    returning = Returning(server.target)
    yield returning
    returning.stop()
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def metrics_reference() -> dict[str, str]:
    """Every metric of this build: {name: type}."""
    table = subprocess.run([binary(), "--metrics_reference"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1] for row in rows}
