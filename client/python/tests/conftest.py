"""Servers and clients of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_server import Server, binary

import attnd

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))


@pytest.fixture(scope="session")
def server_binary() -> None:
    if not binary().exists():
        pytest.fail(f"{binary()} is not built; build it, or name another with ATTND_BINARY")


@pytest.fixture(scope="session")
def server(server_binary: None) -> Iterator[Server]:
    """One for all tests that leave it as it was."""
    running = Server("--kv_cache_bytes=256MiB", "--compute_threads=2")
    yield running
    running.kill()


@pytest.fixture
def start_server(server_binary: None) -> Iterator[Callable[..., Server]]:
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
