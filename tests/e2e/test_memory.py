"""Far more than the server can take, in sizes of requests that leave holes behind: the process, its allocator and gRPC
included, stays within the memory that deploy/README.md says such flags need."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from running_server import Server, binary

MIB = 2**20
CACHE, IN_FLIGHT = 128 * MIB, 32 * MIB
# The cache and an eighth of it, requests in flight and as many that arrive, and 96 MiB for everything else.
PROMISE = CACHE * 9 // 8 + 2 * IN_FLIGHT + 96 * MIB
# Prefills of 3 MiB, many at a time, on connections of their own and on streams.
LOAD = "--model=llama3-8b --prefill_tokens=128 --decode_tokens=8 --rate=300 --duration=4s --warmup=1s --timeout=3s".split()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(f"--kv_cache_bytes={CACHE}", f"--max_inflight_bytes={IN_FLIGHT}", "--max_message_bytes=16MiB")
    yield running
    running.kill()


def test_g06_overload_stays_within_the_memory_limit(server: Server) -> None:
    for spread in (["--connections=1"], ["--connections=8"], ["--connections=4", "--streams=4"]):
        command = [str(binary().parent / "attnload"), f"--target={server.target}", *LOAD, *spread]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "RESOURCE_EXHAUSTED" in run.stdout, run.stdout + run.stderr
        peak = server.peak_memory()
        print(f"{' '.join(spread)}: at most {peak / MIB:.0f} MiB of {PROMISE / MIB:.0f} MiB")
        assert peak < PROMISE
