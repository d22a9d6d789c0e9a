"""L04: a load tester that checks nothing counts wrong answers as success. Ours must not."""

import json
import os
import subprocess
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from running_server import ROOT, Server

BIN = Path(os.environ.get("ATTND_BIN_DIR") or ROOT / "build/release/bin")


class CorruptingProxy(grpc.GenericRpcHandler):
    """Forwards every call as bytes, and changes the output in every n-th answer of a step.

    The output is by far the longest field of an answer, so the four bytes in the middle of it belong to the output, and
    one of them holds most of a float's exponent.
    """

    def __init__(self, server: str, every: int) -> None:
        self._channel = grpc.insecure_channel(server)
        self._every = every
        self._answers = 0
        self.corrupted = 0

    def _corrupt(self, answer: bytes) -> bytes:
        self._answers += 1
        if self._every == 0 or self._answers % self._every:
            return answer
        self.corrupted += 1
        # A whole float, so that its exponent changes wherever the middle is.
        middle = len(answer) // 2
        flipped = bytes(b ^ 0x40 for b in answer[middle : middle + 4])
        return answer[:middle] + flipped + answer[middle + 4 :]

    def service(self, details):
        method = details.method
        if method.endswith("/StepStream"):
            call = self._channel.stream_stream(method)
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, _: (self._corrupt(answer) for answer in call(requests))
            )
        call = self._channel.unary_unary(method)
        if method.endswith("/Step"):
            return grpc.unary_unary_rpc_method_handler(lambda request, _: self._corrupt(call(request)))
        return grpc.unary_unary_rpc_method_handler(lambda request, _: call(request))


@pytest.fixture(scope="module")
def server():
    running = Server("--kv_cache_bytes=256MiB", "--compute_threads=2")
    yield running.target
    running.kill()


def run_attnload(target: str, tmp_path: Path, *flags: str):
    report = tmp_path / "load.json"
    shape = ("--model=custom", "--q_heads=4", "--kv_heads=2", "--head_dim=32")
    load = ("--rate=10", "--prefill_tokens=16", "--decode_tokens=20", "--duration=2s", "--warmup=0")
    done = subprocess.run(
        [BIN / "attnload", f"--target={target}", f"--json={report}", *shape, *load, *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, json.loads(report.read_text())


@pytest.mark.parametrize("streams", [0, 1])
@pytest.mark.parametrize("check_rate", [0, 1], ids=["constant", "float64"])
def test_wrong_answers_fail_the_run_and_name_the_session(server, tmp_path, streams, check_rate):
    # Against float64 a few steps of each session are compared, so more of them have to be wrong.
    proxy = CorruptingProxy(server, every=50 if check_rate == 0 else 3)
    front = grpc.server(futures.ThreadPoolExecutor(32), handlers=[proxy])
    port = front.add_insecure_port("127.0.0.1:0")
    front.start()
    try:
        done, report = run_attnload(f"127.0.0.1:{port}", tmp_path, f"--streams={streams}", f"--check_rate={check_rate}")
    finally:
        front.stop(None)
    assert proxy.corrupted > 0
    assert done.returncode == 1, done.stdout + done.stderr
    assert not report["ok"]
    assert report["checks"]["wrong"] > 0
    mismatch = report["checks"]["mismatches"][0]
    for part in ("session ", "layer 0", "position ", "expected ", "got "):
        assert part in mismatch
    assert mismatch in done.stdout
    assert "FAILED answers" in done.stderr


def test_through_an_honest_proxy_the_same_run_passes(server, tmp_path):
    proxy = CorruptingProxy(server, every=0)
    front = grpc.server(futures.ThreadPoolExecutor(32), handlers=[proxy])
    port = front.add_insecure_port("127.0.0.1:0")
    front.start()
    try:
        done, report = run_attnload(f"127.0.0.1:{port}", tmp_path, "--check_rate=0.5")
    finally:
        front.stop(None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["checks"]["wrong"] == 0
    assert report["checks"]["reference_rows"] > 0
