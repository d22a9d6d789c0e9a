"""Steps in flight on a stream: order, bounds, errors, and what a stream that breaks leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed

import grpc
import numpy as np
import pytest
import reference
from faults import finish_child, no_stream_threads, stopped
from running_server import Server

import attnd

StartServer = Callable[..., Server]
SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY = {"num_q_heads": 1, "head_dim": 4}
ONES = np.ones((1, 1, 4), np.float32)


def tensors(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    q = random.standard_normal((tokens, 4, 16), dtype=np.float32)
    k, v = random.standard_normal((2, tokens, 2, 16), dtype=np.float32)
    return q, k, v


@pytest.fixture
def session(client: attnd.Client) -> Iterator[attnd.Session]:
    with client.create_session(num_layers=2, **SHAPE) as made:
        yield made


def test_s10_steps_in_flight_are_one_sequence(client: attnd.Client, session: attnd.Session) -> None:
    """Scenario S10: steps of one session that are sent at once run in the order sent."""
    q, k, v = tensors(40)
    expected, lse, _ = reference.attend(q, k, v, causal=True)
    with client.step_stream(max_in_flight=64) as stream:
        pending = [
            stream.submit(session, layer, q[n : n + 1], k[n : n + 1], v[n : n + 1], return_lse=True)
            for n in range(40)
            for layer in (0, 1)
        ]
        results = [step.result() for step in pending]
        with pytest.raises(ValueError, match=r"steps .* have no start_position"):
            stream.repeat(pending)
    assert [step.request_id for step in pending] == list(range(1, 81))
    assert [result.start_position for result in results] == [n for n in range(40) for _ in (0, 1)]
    for layer in (0, 1):
        out = np.concatenate([result.out for result in results[layer::2]])
        assert reference.relative_error(out, expected) <= 1e-5
        np.testing.assert_allclose(np.concatenate([r.lse for r in results[layer::2]]), lse, rtol=1e-5, atol=1e-5)


def test_a_stream_and_single_calls_give_the_same_bits(client: attnd.Client, session: attnd.Session) -> None:
    q, k, v = tensors(9)
    with client.step_stream() as stream:
        streamed = stream.submit(session, 0, q, k, v, out_dtype="bf16").result().out
    assert streamed.tobytes() == session.step(1, q, k, v, out_dtype="bf16").out.tobytes()


def test_segments_have_results_and_errors_of_their_own(client: attnd.Client) -> None:
    q, k, v = tensors(3)
    with client.create_session(**SHAPE) as first, client.create_session(**SHAPE) as closed:
        closed.close()
        with client.step_stream() as stream:
            segments = [attnd.Segment(first, 2), attnd.Segment(closed, 1)]
            done, failed = stream.submit_segments(0, segments, q, k, v).result()
            [alone] = stream.submit_segments(0, [attnd.Segment(first.session_id, 3)], q, k, v).result()
        assert (done.length, alone.length) == (2, 5)
        assert isinstance(failed.error, attnd.SessionLost)


def test_a_steps_error_is_its_results_and_the_stream_goes_on(client: attnd.Client, session: attnd.Session) -> None:
    q, k, v = tensors(2)
    with client.step_stream() as stream:
        good = stream.submit(session, 0, q, k, v, start_position=0)
        bad = stream.submit(session, 0, q, k, v, start_position=7)
        after = stream.submit(session, 0, q, k, v, start_position=2)
        with pytest.raises(attnd.BadPosition) as caught:
            bad.result()
        assert (caught.value.reason, caught.value.length) == ("BAD_POSITION", 2)
        assert [good.result().length, after.result().length] == [2, 4]
        with pytest.raises(ValueError, match="step 1 was answered"):
            stream.repeat([good])
        with pytest.raises(ValueError, match="q has head_dim 16 and k has 8"):
            stream.submit(session, 0, q, k[..., :8], v)
        with pytest.raises(ValueError, match="at least one segment"):
            stream.submit_segments(0, [], q, k, v)


def test_what_nobody_asked_for_is_raised_at_the_end(client: attnd.Client, session: attnd.Session) -> None:
    _, k, v = tensors(1)
    with pytest.raises(attnd.BadPosition), client.step_stream() as stream:
        stream.submit(session, 0, None, k, v)
        stream.submit(session, 0, None, k, v, start_position=9)
    assert session.info().length == 1
    with pytest.raises(KeyError), client.step_stream() as stream:  # the error that is under way comes first
        stream.submit(session, 0, None, k, v, start_position=9)
        raise KeyError("the first")


def test_submitting_waits_while_the_stream_is_full(start_server: StartServer) -> None:
    server = start_server()
    with attnd.Client(server.target) as client, client.create_session(**TINY) as session:
        with client.step_stream(max_in_flight=3) as stream:
            stream.submit(session, 0, ONES, ONES, ONES).result()
            with stopped(server):
                pending = [stream.submit(session, 0, ONES, ONES, ONES) for _ in range(3)]
                waiting = threading.Thread(
                    target=lambda: pending.append(stream.submit(session, 0, ONES, ONES, ONES)), daemon=True
                )
                waiting.start()
                waiting.join(0.3)
                assert waiting.is_alive()
                assert stream.unanswered == pending[:3]
            waiting.join(20)
            assert [step.result().length for step in pending] == [2, 3, 4, 5]
            assert not stream.unanswered
        for bad in (0, -1):
            with pytest.raises(ValueError, match=f"max_in_flight is {bad}"):
                client.step_stream(max_in_flight=bad)


def test_futures_work_with_the_standard_library(client: attnd.Client, session: attnd.Session) -> None:
    q, k, v = tensors(1)
    seen: list[int] = []
    with client.step_stream() as stream:
        pending = [stream.submit(session, 0, q, k, v) for _ in range(5)]
        pending[2].add_done_callback(lambda step: seen.append(step.result().length))
        assert sorted(step.result().length for step in as_completed(pending, timeout=20)) == [1, 2, 3, 4, 5]
        assert not pending[4].cancel()
    assert seen == [3]


def test_a_closed_stream_takes_nothing_more(client: attnd.Client, session: attnd.Session) -> None:
    q, k, v = tensors(1)
    stream = client.step_stream()
    pending = [stream.submit(session, 0, q, k, v) for _ in range(4)]
    stream.close()
    assert [step.done() for step in pending] == [True] * 4
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(session, 0, q, k, v)
    stream.close()
    stream.cancel()
    assert session.info().length == 4


def test_a_step_that_is_too_large_does_not_end_the_stream(client: attnd.Client) -> None:
    with client.create_session(num_q_heads=1, head_dim=256) as session, client.step_stream() as stream:
        large = np.zeros((22_000, 1, 256), np.float32)
        with pytest.raises(attnd.ResourceExhausted) as caught:
            stream.submit(session, 0, large, large, large)
        assert caught.value.reason == "MESSAGE_TOO_LARGE"
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stream.submit(session, 0, large[:1], large[:1], large[:1]).result().length == 1


def test_threads_share_a_stream(client: attnd.Client) -> None:
    """Each thread's session is one sequence, whatever the others submit in between."""
    q, k, v = tensors(30)
    expected = reference.attend(q, k, v, causal=True)[0]
    sessions = [client.create_session(**SHAPE) for _ in range(8)]
    outs: dict[str, np.ndarray] = {}

    def work(stream: attnd.StepStream, session: attnd.Session) -> None:
        pending = [stream.submit(session, 0, q[n : n + 1], k[n : n + 1], v[n : n + 1]) for n in range(30)]
        outs[session.session_id] = np.concatenate([step.result().out for step in pending])

    with client.step_stream(max_in_flight=5) as stream:
        threads = [threading.Thread(target=work, args=(stream, session)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for session in sessions:
        assert reference.relative_error(outs[session.session_id], expected) <= 1e-5
        session.close()


def test_a_forked_child_has_no_part_in_its_parents_stream(client: attnd.Client, session: attnd.Session) -> None:
    q, k, v = tensors(1)
    with client.step_stream() as stream:
        stream.submit(session, 0, q, k, v).result()
        child = os.fork()
        if child == 0:

            def work() -> None:
                with pytest.raises(RuntimeError, match="forked from"), stream:
                    stream.submit(session, 0, q, k, v)
                with client.step_stream() as own:
                    assert own.submit(session, 0, q, k, v).result(20).length == 2

            finish_child(work)
        status = os.waitpid(child, 0)[1]
        assert status == 0
        assert stream.submit(session, 0, q, k, v).result().length == 3


def test_a_forked_child_does_not_wait_for_its_parents_steps(start_server: StartServer) -> None:
    server = start_server()
    with (
        attnd.Client(server.target) as client,
        client.create_session(**TINY) as session,
        client.step_stream() as stream,
    ):
        answered = stream.submit(session, 0, ONES, ONES, ONES)
        answered.result()
        with stopped(server):
            pending = stream.submit(session, 0, ONES, ONES, ONES)
            child = os.fork()
            if child == 0:

                def work() -> None:
                    for use in (answered.result, pending.result, pending.exception, lambda: stream.unanswered):
                        with pytest.raises(RuntimeError, match="forked from"):
                            use()

                finish_child(work, seconds=10)
            status = os.waitpid(child, 0)[1]
        assert status == 0
        assert pending.result().length == 2


def test_a_forgotten_stream_is_let_go(start_server: StartServer) -> None:
    """Its threads, and its place among the server's; the answers of its steps come none the less."""
    server = start_server("--max_streams=1")
    with attnd.Client(server.target) as client, client.create_session(**TINY) as session:
        for length in (1, 2):
            stream = client.step_stream()
            with stopped(server):
                pending = stream.submit(session, 0, ONES, ONES, ONES)
                del stream
            assert pending.result().length == length
            assert no_stream_threads()


def test_a_program_that_forgets_its_stream_ends(server: Server) -> None:
    program = f"""
import attnd, numpy as np
client = attnd.Client({server.target!r})
session = client.create_session(num_q_heads=1, head_dim=4)
stream = client.step_stream()
ones = np.ones((1, 1, 4), np.float32)
print(stream.submit(session, 0, ones, ones, ones).result().length)
session.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
