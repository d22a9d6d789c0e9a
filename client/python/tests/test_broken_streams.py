"""Streams that end with steps in flight: what those say, and how they are sent again."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
import reference
from faults import stopped
from lossy_proxy import LossyProxy
from running_server import Server
from test_streams import ONES, SHAPE, TINY, tensors

import attnd

StartServer = Callable[..., Server]


def test_p06_a_silent_server_ends_the_stream_in_a_deadline(start_server: StartServer) -> None:
    """Scenario P06, with the client's timeout and with the stream's; a stream without steps waits for nothing."""
    server = start_server()
    with (
        attnd.Client(server.target, timeout=20) as client,
        client.create_session(**TINY) as session,
    ):
        for _ in range(20):  # a busy machine may not answer in time
            client.timeout = 0.7
            stream = client.step_stream()
            client.timeout = 20
            with contextlib.suppress(attnd.DeadlineExceeded):
                stream.submit(session, 0, ONES, ONES, ONES, start_position=0).result()
                break
        time.sleep(1)
        with stopped(server):
            start = time.monotonic()
            pending = [stream.submit(session, 0, ONES, ONES, ONES, start_position=1 + n) for n in range(2)]
            for step in pending:
                with pytest.raises(attnd.DeadlineExceeded, match=r"no step for 0.7 s; it has its start_position"):
                    step.result()
            assert time.monotonic() - start > 0.6
            with pytest.raises(attnd.DeadlineExceeded):
                stream.submit(session, 0, ONES, ONES, ONES)
            stream.close()
            other = client.step_stream(timeout=0.2)
            with pytest.raises(attnd.DeadlineExceeded, match=r"0\.2 s"):
                other.submit(session, 0, ONES, ONES, ONES).result()
            other.close()
        with client.step_stream(timeout=20) as again:
            assert [step.result().length for step in again.repeat(stream.unanswered)] == [2, 3]


def test_p07_a_stream_that_breaks_says_what_can_be_repeated(start_server: StartServer) -> None:
    """Scenario P07: the server is killed with steps in flight, and sessions are gone."""
    server = start_server()
    with attnd.Client(server.target) as client:
        session = client.create_session(**TINY)
        stream = client.step_stream()
        answered = stream.submit(session, 0, ONES, ONES, ONES)
        assert answered.result().length == 1
        with stopped(server):
            placed = stream.submit(session, 0, ONES, ONES, ONES, start_position=1)
            appended = stream.submit(session, 0, ONES, ONES, ONES)
            server.kill()
        with pytest.raises(attnd.Unavailable, match=r"step 2 has no answer: .*another stream can repeat it"):
            placed.result()
        with pytest.raises(attnd.Unavailable, match=r"step 3 has no answer: .*no start_position"):
            appended.result()
        assert [placed.repeatable, appended.repeatable] == [True, False]
        assert stream.unanswered == [placed, appended]
        with pytest.raises(attnd.Unavailable):
            stream.submit(session, 0, ONES, ONES, ONES)
        stream.close()
        start_server(listen=server.target)
        assert client.server_info().sessions_active == 0
        with client.step_stream() as again:
            with pytest.raises(ValueError, match=r"steps \[3\] have no start_position"):
                again.repeat(stream.unanswered)
            [lost] = again.repeat([placed])
            with pytest.raises(attnd.SessionLost) as caught:
                lost.result()
        assert caught.value.reason == "NEVER_EXISTED"


@pytest.mark.parametrize("rewinding", [False, True])
def test_s09_steps_whose_answers_were_lost_are_repeated(start_server: StartServer, rewinding: bool) -> None:
    """Scenario S09: the server did all of them and nobody heard of it; twice, the repetition's answers are lost too."""
    server = start_server()
    proxy = LossyProxy(server.target)
    q, k, v = tensors(160)
    expected = reference.attend(q, k, v, causal=True)[0]
    parts = [slice(start, start + 30) for start in range(10, 160, 30)]
    with attnd.Client(proxy.target) as client, client.create_session(num_layers=2, **SHAPE) as session:
        prefix = 40 if rewinding else 10
        for layer in (0, 1):
            session.step(layer, q[:prefix], k[:prefix], v[:prefix])
        proxy.lose_answer_of(70_000)
        stream = client.step_stream(max_in_flight=10)
        pending = [
            stream.submit(session, layer, q[p], k[p], v[p], p.start, rewind=rewinding and p.start == 10)
            for p in parts
            for layer in (0, 1)
        ]
        with pytest.raises(attnd.Unavailable):
            pending[0].result()
        lost = stream.unanswered
        assert lost == pending
        proxy.lose_answer_of(70_000)
        for _ in range(20):
            try:
                with client.step_stream(max_in_flight=10) as again:
                    results = [step.result() for step in again.repeat(lost)]
                break
            except attnd.Unavailable:
                time.sleep(0.05)
        assert proxy.lost == 2
        for layer in (0, 1):
            out = np.concatenate([result.out for result in results[layer::2]])
            assert reference.relative_error(out, expected[10:]) <= 1e-5
        assert session.info().layer_lengths == (160, 160)
    proxy.close()


def test_only_what_cannot_see_more_than_before_is_repeated(start_server: StartServer) -> None:
    server = start_server()
    with attnd.Client(server.target) as client, client.create_session(**TINY, causal=False) as session:
        session.step(0, ONES, ONES, ONES)
        stream = client.step_stream()
        with stopped(server):
            stream.submit(session, 0, ONES, None, None, start_position=0)
            stream.submit(session, 0, ONES, ONES, ONES, start_position=1)
            stream.cancel()
        with client.step_stream() as again:
            with pytest.raises(ValueError, match="step 2 appends to layer 0 of a session behind a step without k"):
                again.repeat(stream.unanswered)
            assert again.repeat(stream.unanswered[:1])[0].result().out.tolist() == ONES.tolist()


def test_a_step_that_may_follow_other_tokens_by_now_is_not_repeated(start_server: StartServer) -> None:
    """The second cuts below the first. If both were done, the first would now be computed over the second's tokens."""
    server = start_server()
    proxy = LossyProxy(server.target)
    q, k, v = tensors(300)
    with attnd.Client(proxy.target) as client, client.create_session(**SHAPE) as session:
        session.step(0, q[:200], k[:200], v[:200])
        proxy.lose_answer_of(30_000)
        stream = client.step_stream()
        stream.submit(session, 0, q[200:], k[200:], v[200:], start_position=200)
        stream.submit(session, 0, q[:150], k[:150], v[:150], start_position=100, rewind=True)
        for step in stream.unanswered:
            with pytest.raises(attnd.Unavailable):
                step.result()
        assert (proxy.lost, len(stream.unanswered)) == (1, 2)
        expected = "step 2 starts at 100 of layer 0 of a session, below 200"
        with client.step_stream() as again, pytest.raises(ValueError, match=expected):
            again.repeat(stream.unanswered)
    proxy.close()


def test_o04_a_drain_answers_what_is_in_flight_and_ends_the_stream(start_server: StartServer) -> None:
    """Scenario O04."""
    server = start_server("--drain_timeout=20s")
    with attnd.Client(server.target) as client:
        session = client.create_session(**TINY)
        stream = client.step_stream()
        assert stream.submit(session, 0, ONES, ONES, ONES).result().length == 1
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(attnd.Unavailable) as caught:
            for _ in range(1000):
                stream.submit(session, 0, ONES, ONES, ONES).result()
                time.sleep(0.01)
        assert caught.value.reason == "DRAINING"
        assert server.process.wait(20) == 0


def test_cancelling_fails_what_is_in_flight(start_server: StartServer) -> None:
    server = start_server()
    with attnd.Client(server.target) as client, client.create_session(**TINY) as session:
        with stopped(server), pytest.raises(KeyError), client.step_stream() as stream:
            pending = stream.submit(session, 0, ONES, ONES, ONES)
            raise KeyError("leave")
        with pytest.raises(attnd.Cancelled):
            pending.result(timeout=0)


def test_streams_are_limited_by_name(start_server: StartServer) -> None:
    server = start_server("--max_streams=1")
    with attnd.Client(server.target) as client, client.step_stream() as first:
        session = client.create_session(**TINY)
        assert first.submit(session, 0, ONES, ONES, ONES).result().length == 1
        second = client.step_stream()
        with pytest.raises(attnd.ResourceExhausted) as caught:
            second.submit(session, 0, ONES, ONES, ONES).result()
        assert caught.value.reason == "STREAM_LIMIT"
        second.close()
        assert first.submit(session, 0, ONES, ONES, ONES).result().length == 2
