"""The asyncio client: it does what the other does, in its event loop."""

from __future__ import annotations

import asyncio
import inspect
import io
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from faults import stopped
from lossy_proxy import LossyProxy
from running_server import Server

import attnd
import attnd.aio

StartServer = Callable[..., Server]
SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY = attnd.SessionConfig(num_q_heads=1, head_dim=4)
ONES = np.ones((1, 1, 4), np.float32)


def tensors(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(tokens)
    q = random.standard_normal((tokens, 4, 16), dtype=np.float32)
    k, v = random.standard_normal((2, tokens, 2, 16), dtype=np.float32)
    return q, k, v


@pytest.mark.parametrize(
    ("plain", "asynchronous"),
    [
        (attnd.Client, attnd.aio.Client),
        (attnd.Session, attnd.aio.Session),
        (attnd.StepStream, attnd.aio.StepStream),
    ],
    ids=["Client", "Session", "StepStream"],
)
def test_both_clients_have_the_same_methods_and_arguments(plain: type, asynchronous: type) -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            name: [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    expected = methods(plain)
    expected.pop("send_step", None)  # for this package's own code
    assert methods(asynchronous) == expected


def test_everything_a_client_does(server: Server, tmp_path: Path) -> None:
    q, k, v = tensors(20)
    expected, lse, _ = reference.attend(q, k, v, causal=True)

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            result = await client.attend(q, k, v, causal=True, return_lse=True)
            assert reference.relative_error(result.out, expected) <= 1e-5
            np.testing.assert_allclose(result.lse, lse, rtol=1e-5, atol=1e-5)

            async with await client.create_session(num_layers=2, **SHAPE) as session:
                assert repr(session) == f"attnd.aio.Session({session.session_id!r})"
                assert (await session.step(0, q[:19], k[:19], v[:19])).length == 19
                out = (await session.step(0, q[19:], k[19:], v[19:], start_position=19)).out
                assert reference.relative_error(out, expected[19:]) <= 1e-5
                child = await session.fork(10)
                assert (await child.info()).layer_lengths == (10, 0)
                assert await client.reorder([session, child], [1, 1]) == [10, 10]
                assert (await session.rewind(7)).length == 7
                segments = [attnd.Segment(session, 1), attnd.Segment(child, 1)]
                assert [r.length for r in await client.step(0, segments, q[:2], k[:2], v[:2])] == [8, 11]
                listed = [info.session_id async for info in client.list_sessions(page_size=1)]
                assert listed == [session.session_id, child.session_id]
                path, buffer = tmp_path / "snapshot", io.BytesIO()
                assert await session.export(path) == await session.export(buffer)
                assert path.read_bytes() == buffer.getvalue()
                buffer.seek(0)
                for source in (path, buffer):
                    async with await client.import_session(source, expected=session.config) as copy:
                        assert (await copy.info()).length == 8
                assert await client.close_session(child)
                assert not await client.close_session(child)
            info = await client.server_info(attnd.SessionConfig(num_q_heads=1, head_dim=8))
            assert (info.sessions_active, info.bytes_per_token > 0) == (0, True)

    asyncio.run(main())


def test_errors_are_the_same(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            async with await client.create_session(TINY) as session:
                with pytest.raises(attnd.BadPosition) as position:
                    await session.step(0, ONES, ONES, ONES, start_position=3)
                assert position.value.length == 0
                with pytest.raises(ValueError, match="the session needs"):
                    await session.step(0, ONES, ONES, ONES[..., :2])
            with pytest.raises(attnd.SessionLost) as lost:
                await session.info()
            assert lost.value.reason == "CLOSED"
            await session.close()
            with pytest.raises(attnd.InvalidArgument) as damaged:
                await client.import_session(io.BytesIO(b"no snapshot" * 1_000_000))
            assert damaged.value.reason == "BAD_SNAPSHOT"
            target = tmp_path / "kept"
            target.write_bytes(b"before")
            with pytest.raises(attnd.SessionLost):
                await client.export_session("0" * 32, target)
            assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]
            with pytest.raises(FileNotFoundError):
                await client.import_session(tmp_path / "missing")
            with pytest.raises(KeyError):
                async with await client.create_session(TINY) as session:
                    await client.close()
                    raise KeyError("the first")

    asyncio.run(main())
    with pytest.raises(ValueError, match="timeout is 0"):
        attnd.aio.Client("127.0.0.1:1", timeout=0)


def test_calls_run_side_by_side(server: Server) -> None:
    q, k, v = tensors(30)
    expected = reference.attend(q, k, v, causal=True)[0]

    async def sequence(client: attnd.aio.Client) -> float:
        async with await client.create_session(**SHAPE) as session:
            outs = [(await session.step(0, q[n : n + 1], k[n : n + 1], v[n : n + 1])).out for n in range(30)]
            return reference.relative_error(np.concatenate(outs), expected)

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            assert max(await asyncio.gather(*(sequence(client) for _ in range(16)))) <= 1e-5

    asyncio.run(main())


def test_p04_a_client_is_made_before_its_loop_and_outlives_it(server: Server) -> None:
    """Scenario P04: a client of the module, used by one ``asyncio.run`` after the other."""
    client = attnd.aio.Client(server.target)
    session_ids = [asyncio.run(client.create_session(TINY)).session_id for _ in range(2)]

    async def last() -> None:
        for session_id in session_ids:
            assert await client.close_session(session_id)
        await client.close()
        assert (await client.server_info()).version
        await client.close()

    asyncio.run(last())


def test_p04_two_loops_at_once_are_an_error_that_says_so(server: Server) -> None:
    """Scenario P04: neither "attached to a different loop" nor a call that waits for ever."""
    client = attnd.aio.Client(server.target)
    raised: list[BaseException] = []

    def other_loop() -> None:
        for use in (client.server_info, client.close):
            try:
                asyncio.run(use())
            except BaseException as error:
                raised.append(error)

    async def main() -> None:
        assert (await client.server_info()).version
        await asyncio.to_thread(other_loop)
        assert [type(error) for error in raised] == [RuntimeError] * 2
        assert all("in use in another event loop" in str(error) for error in raised)
        assert (await client.server_info()).version
        await client.close()
        raised.clear()
        await asyncio.to_thread(other_loop)  # nobody's any more
        assert not raised

    asyncio.run(main())
    with pytest.raises(RuntimeError, match="no event loop is running"):
        client.step_stream()


def test_p06_a_silent_server_is_a_deadline(start_server: StartServer) -> None:
    """Scenario P06."""
    server = start_server()
    assert attnd.aio.Client(server.target).timeout == 30

    async def main() -> None:
        async with attnd.aio.Client(server.target, timeout=20) as client:
            session = await client.create_session(TINY)
            await session.step(0, ONES, ONES, ONES)
            buffer = io.BytesIO()
            await session.export(buffer)
            with stopped(server):
                client.timeout = 0.5
                start = time.monotonic()
                with pytest.raises(attnd.DeadlineExceeded):
                    await session.step(0, ONES, ONES, ONES)
                assert time.monotonic() - start > 0.4
                with pytest.raises(attnd.DeadlineExceeded):
                    await session.export(io.BytesIO())
                with pytest.raises(attnd.DeadlineExceeded):
                    await client.import_session(io.BytesIO(buffer.getvalue()))
            client.timeout = 20
            assert (await session.info()).length in (1, 2)

    asyncio.run(main())


def test_p07_a_restart_loses_sessions_by_name(start_server: StartServer) -> None:
    """Scenario P07: never a session that is silently new."""
    server = start_server()

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            session = await client.create_session(TINY)
            await session.step(0, ONES, ONES, ONES)
            server.kill()
            with pytest.raises(attnd.Unavailable):
                await session.step(0, ONES, ONES, ONES)
            start_server(listen=server.target)
            assert (await client.server_info()).sessions_active == 0
            with pytest.raises(attnd.SessionLost) as lost:
                await session.step(0, ONES, ONES, ONES, start_position=1)
            assert lost.value.reason == "NEVER_EXISTED"
            await session.close()

    asyncio.run(main())


def test_s09_a_lost_answer_is_asked_for_again(start_server: StartServer) -> None:
    """Scenario S09, and what is not asked for again: a step without a position, and a fork."""
    server = start_server()
    proxy = LossyProxy(server.target)
    q, k, v = tensors(400)
    expected = reference.attend(q, k, v, causal=True)[0]

    async def main() -> None:
        async with attnd.aio.Client(proxy.target) as client:
            session = await client.create_session(**SHAPE)
            await session.step(0, q[:200], k[:200], v[:200], start_position=0)
            proxy.lose_answer_of(30_000)
            result = await session.step(0, q[200:], k[200:], v[200:], start_position=200)
            assert (proxy.lost, result.length) == (1, 400)
            assert reference.relative_error(result.out, expected[200:]) <= 1e-5
            proxy.lose_answer_of(30_000)
            with pytest.raises(attnd.Unavailable):
                await session.step(0, q[200:], k[200:], v[200:])
            assert (await session.info()).length == 600  # and there is a connection again
            proxy.lose_answer_of(100)
            with pytest.raises(attnd.Unavailable):
                await session.fork()
            assert proxy.lost == 3
            assert [info.length async for info in client.list_sessions()] == [600, 600]

    asyncio.run(main())
    proxy.close()


def test_cancelling_a_task_cancels_its_call(start_server: StartServer) -> None:
    server = start_server()

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            session = await client.create_session(TINY)
            with stopped(server):
                task = asyncio.create_task(session.step(0, ONES, ONES, ONES))
                await asyncio.sleep(0.1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                for transfer in (session.export(io.BytesIO()), client.import_session(io.BytesIO(b"x"))):
                    task = asyncio.create_task(transfer)
                    await asyncio.sleep(0.1)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
            assert (await session.info()).length in (0, 1)

    asyncio.run(main())


def test_an_import_that_is_done_as_it_is_cancelled_leaves_no_session(start_server: StartServer) -> None:
    server = start_server()

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            buffer = io.BytesIO()
            async with await client.create_session(TINY) as session:
                await session.export(buffer)
            buffer.seek(0)
            # One thread, so that what comes behind the import begins when it is done.
            with ThreadPoolExecutor(1) as threads:
                asyncio.get_running_loop().set_default_executor(threads)
                task = asyncio.create_task(client.import_session(buffer))
                await asyncio.sleep(0)
                with attnd.Client(server.target) as plain:  # the event loop stands still: it has heard of nothing
                    assert threads.submit(lambda: plain.server_info().sessions_active).result(20) == 1
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await client.server_info()).sessions_active == 0

    asyncio.run(main())


def test_a_token_travels(start_server: StartServer, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("correct-horse-battery-staple\n")
    tokens.chmod(0o600)
    server = start_server(f"--auth_tokens_file={tokens}")

    async def version(client: attnd.aio.Client) -> str:
        async with client:
            return (await client.server_info()).version

    good = attnd.aio.Client(server.target, token="correct-horse-battery-staple")
    assert asyncio.run(version(pickle.loads(pickle.dumps(good))))
    with pytest.raises(attnd.Unauthenticated):
        asyncio.run(version(attnd.aio.Client(server.target)))


def test_loops_in_threads_have_clients_of_their_own(server: Server) -> None:
    q, k, v = tensors(10)
    expected = reference.attend(q, k, v)[0]
    errors: list[float] = []

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            for _ in range(20):
                errors.append(reference.relative_error((await client.attend(q, k, v)).out, expected))

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 60
    assert max(errors) <= 1e-5
