"""attnd, load on it, and Prometheus on both, for the tests of what an operator watches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "client/python/tests")]

from prometheus import Prometheus  # noqa: E402
from returning import Returning  # noqa: E402
from running_server import Server, binary  # noqa: E402

# Small steps, unary and streamed, at a rate that half a processor can serve.
LOAD = ["--model=smollm2-135m", "--layers=1", "--rate=5", "--prefill_tokens=64", "--decode_tokens=64",
        "--decode_interval=10ms", "--duration=10m"]


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
