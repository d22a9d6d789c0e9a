"""attnd, load on it, and Prometheus on both, for the tests of what an operator watches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "client/python/tests")]

from prometheus import Prometheus  # noqa: E402
from running_server import Server, binary  # noqa: E402

LOAD = ["demo", "--sessions=4", "--layers=1", "--q_heads=8", "--kv_heads=2", "--head_dim=64", "--prefill=64",
        "--decode=1000000"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server("--kv_cache_bytes=256MiB", "--compute_threads=1")
    yield running
    running.kill()


@pytest.fixture(scope="session")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = Prometheus(server.metrics, tmp_path_factory.mktemp("prometheus"))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def load(server: Server) -> Iterator[None]:
    """Prefills and decodes, unary and streamed, until the tests are over."""
    program = str(binary().parent / "attnctl")
    running = [subprocess.Popen([program, *LOAD, *more], env=os.environ | {"ATTND_SERVER": server.target},
                                stdout=subprocess.DEVNULL) for more in ([], ["--stream"])]
    yield
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def metrics_reference() -> dict[str, str]:
    """Every metric of this build: {name: type}."""
    table = subprocess.run([binary(), "--metrics_reference"], capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1] for row in rows}
