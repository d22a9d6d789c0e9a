"""Clients of the containers. Every K is 0, so that an answer is the plain mean of all V of its session."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import grpc
import numpy as np
from attnd.v1 import attnd_pb2 as pb
from attnd.v1 import attnd_pb2_grpc

HEADS, HEAD_DIM = 2, 8
ROUND_ROBIN = (("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),)


def config() -> pb.SessionConfig:
    return pb.SessionConfig(num_layers=1, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM)


def tensor(value: float, tokens: int = 1) -> pb.Tensor:
    return pb.Tensor(dtype=pb.DTYPE_F32, data=np.full((tokens, HEADS, HEAD_DIM), value, "<f4").tobytes())


def step(session_id: str, value: float, position: int | None = None) -> pb.StepRequest:
    segment = pb.Segment(session_id=session_id, num_tokens=1, start_position=position)
    return pb.StepRequest(segments=[segment], q=tensor(1), k=tensor(0), v=tensor(value))


def mean(answer: pb.StepResponse) -> float:
    return float(np.frombuffer(answer.out.data, "<f4")[0])


class Calls:
    """The stub of a channel of its own."""

    def __init__(self, target: str, options: tuple[tuple[str, object], ...] = ()) -> None:
        self.channel = grpc.insecure_channel(target, (("grpc.use_local_subchannel_pool", 1), *options))
        self.stub = attnd_pb2_grpc.AttentionStub(self.channel)

    def create(self) -> str:
        return self.stub.CreateSession(pb.CreateSessionRequest(config=config()), timeout=20).session_id

    def step(self, session_id: str, value: float, position: int | None = None) -> float:
        return mean(self.stub.Step(step(session_id, value, position), timeout=20))


class OpenStream:
    """A StepStream that stays open between its steps."""

    def __init__(self, calls: Calls) -> None:
        self._requests: SimpleQueue[pb.StepRequest | None] = SimpleQueue()
        self._answers: Iterator[pb.StepResponse] = calls.stub.StepStream(iter(self._requests.get, None))

    def step(self, session_id: str, value: float) -> float:
        self._requests.put(step(session_id, value))
        answer = next(self._answers)
        assert not answer.HasField("status"), answer.status
        return mean(answer)

    def end(self) -> grpc.RpcError | None:
        """Waits for the end that the server makes. None: it ended well."""
        try:
            for _ in self._answers:
                pass
        except grpc.RpcError as error:
            return error
        finally:
            self._requests.put(None)
        return None


class HealthProbe:
    """Asks the health service all the time, as kubelet does, and notes how long each answer took."""

    def __init__(self, target: str, period: float = 0.1) -> None:
        self.seconds: list[float] = []
        self.answers: set[str] = set()
        self._check = grpc.insecure_channel(target).unary_unary("/grpc.health.v1.Health/Check")
        self._period, self._over = period, threading.Event()
        self._check(b"", timeout=5)  # the connection is made once
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(self._period):
            start = time.perf_counter()
            try:
                self.answers.add("SERVING" if self._check(b"", timeout=5) == b"\x08\x01" else "NOT_SERVING")
            except grpc.RpcError as error:
                self.answers.add(f"{error.code().name}: {error.details()}")
            self.seconds.append(time.perf_counter() - start)

    def check(self) -> str:
        """Fails when a probe would have. Returns the figures.

        The probe itself runs on processors that the load has taken: of a hundred answers one may be late by that.
        """
        ordered = sorted(self.seconds)
        p99 = ordered[int(0.99 * len(ordered))]
        figures = f"{len(ordered)} health checks: p99 {p99 * 1e3:.1f} ms, slowest {ordered[-1] * 1e3:.1f} ms"
        assert self.answers == {"SERVING"}, f"{figures}: {self.answers}"
        assert len(ordered) > 50 and p99 < 0.1 and ordered[-1] < 1, figures
        return figures

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
