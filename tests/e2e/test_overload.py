"""Twice the rate that the server can sustain: what is let in keeps its latency, the rest is refused quickly, memory does
not grow, and afterwards nothing is left. ATTND_OVERLOAD_SECONDS sets how long (60 shows more than the default)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import Server, binary

SECONDS = int(os.environ.get("ATTND_OVERLOAD_SECONDS", "12"))
MAX_QUEUE_DELAY_S = 0.1
# What a machine that the load generator shares adds to the waiting time that was promised.
FIRST_OUTPUT_P99_S = 10 * MAX_QUEUE_DELAY_S
DECODE_P99_S = 0.25
GAUGES = (
    "attnd_queue_depth attnd_queue_tokens attnd_inflight_bytes attnd_requests_in_flight attnd_streams_active "
    "attnd_sessions_active attnd_kv_cache_used_bytes attnd_kv_cache_reserved_bytes attnd_kv_cache_tokens"
).split()
# Little to send for what it costs to compute, so that the server is what is overloaded and not the connection.
SHAPE = "--layers=1 --q_heads=32 --kv_heads=1 --head_dim=16 --prefill_tokens=256 --decode_tokens=8".split()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server("--kv_cache_bytes=1GiB", "--compute_threads=1", f"--max_queue_delay={MAX_QUEUE_DELAY_S}s")
    yield running
    running.kill()


def load(server: Server, folder: Path, rate: float, seconds: int) -> dict[str, Any]:
    """Runs attnload; its results. It fails on rejections, which are the point here, and on wrong answers, which are not."""
    results = folder / f"load-{rate}.json"
    command = [str(binary().parent / "attnload"), f"--target={server.target}", f"--metrics={server.metrics}", *SHAPE]
    command += [f"--rate={rate}", f"--duration={seconds}s", "--warmup=1s", "--connections=4", f"--json={results}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    assert results.exists(), run.stdout + run.stderr
    found: dict[str, Any] = json.loads(results.read_text())
    assert found["checks"]["wrong"] == 0, run.stdout
    return found


def completed_per_second(results: dict[str, Any], seconds: int) -> float:
    return float(results["sessions"]["completed"]) / (seconds + 1)


def scrape(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_twice_the_sustainable_rate(server: Server, tmp_path: Path) -> None:
    # What it completes of too much is what it can sustain; of far too much it completes less, on a machine that the load
    # generator shares.
    capacity = max(completed_per_second(load(server, tmp_path, rate, 4), 4) for rate in (200, 500))
    peak = server.peak_memory()
    results = load(server, tmp_path, round(2 * capacity), SECONDS)
    latency, errors = results["latency"], results["errors"]
    rejected = latency["prefill"]["rejected"]
    print(f"capacity {capacity:.0f} sessions/s, offered {2 * capacity:.0f}, sessions {results['sessions']}")
    print(f"errors {errors}")
    for name in ("first_output", "decode"):
        print(name, {key: value for key, value in latency[name]["latency"].items() if key in ("count", "p50_s", "p99_s")})
    print("rejected", rejected)

    # It was too much, and what was refused was refused for the reason meant for that.
    assert rejected["count"] > 0
    assert set(errors) == {"RESOURCE_EXHAUSTED (QUEUE_FULL)"}, errors
    # As much is completed as before: rejecting does not take the time that computing needs.
    assert completed_per_second(results, SECONDS) > 0.5 * capacity
    # At once, beside what is accepted; how soon in milliseconds is the benchmark's to say.
    assert rejected["p50_s"] < 0.05
    assert rejected["p50_s"] < latency["first_output"]["latency"]["p50_s"]
    assert rejected["p99_s"] < 0.1
    assert latency["first_output"]["latency"]["p99_s"] < FIRST_OUTPUT_P99_S
    assert latency["decode"]["latency"]["p99_s"] < DECODE_P99_S

    # What is resident follows how much waits, which differs from second to second. What far more load has needed is
    # the most; something that is never given back would go beyond it.
    memory = results["server_metrics"]["process_resident_memory_bytes"]
    late = statistics.median(memory[2 * len(memory) // 3 :])
    print(f"resident {late / 2**20:.0f} MiB in the last third, at most {peak / 2**20:.0f} MiB under far more load")
    assert late < peak * 1.1 + 8 * 2**20

    after = scrape(server)
    assert {name: after[name] for name in GAUGES} == dict.fromkeys(GAUGES, 0)
