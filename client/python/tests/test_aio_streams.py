"""The asyncio client's stream of steps."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable

import numpy as np
import pytest
import reference
from faults import finish_child, no_stream_threads, stopped
from lossy_proxy import LossyProxy
from running_server import Server
from test_aio import ONES, SHAPE, TINY, tensors

import attnd
import attnd.aio

StartServer = Callable[..., Server]


def test_s10_steps_in_flight_are_one_sequence(server: Server) -> None:
    """Scenario S10."""
    q, k, v = tensors(40)
    expected = reference.attend(q, k, v, causal=True)[0]

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            session = await client.create_session(**SHAPE)
            async with client.step_stream(max_in_flight=64) as stream:
                pending = [await stream.submit(session, 0, q[n : n + 1], k[n : n + 1], v[n : n + 1]) for n in range(40)]
                [alone] = await (await stream.submit_segments(0, [attnd.Segment(session, 2)], q[:2], k[:2], v[:2]))
                outs = [result.out for result in await asyncio.gather(*pending)]
            assert reference.relative_error(np.concatenate(outs), expected) <= 1e-5
            assert alone.length == 42
            await session.close()

    asyncio.run(main())


def test_errors_of_steps_and_what_nobody_asked_for(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with attnd.aio.Client(server.target) as client, await client.create_session(TINY) as session:
            async with client.step_stream() as stream:
                bad = await stream.submit(session, 0, ONES, ONES, ONES, start_position=7)
                good = await stream.submit(session, 0, ONES, ONES, ONES)
                with pytest.raises(attnd.BadPosition):
                    await bad
                assert (await good).length == 1
            with pytest.raises(attnd.BadPosition):
                async with client.step_stream() as stream:
                    await stream.submit(session, 0, ONES, ONES, ONES, start_position=7)
            with pytest.raises(RuntimeError, match="closed"):
                await stream.submit(session, 0, ONES, ONES, ONES)
            with pytest.raises(KeyError):
                async with client.step_stream() as stream:
                    await stream.submit(session, 0, ONES, ONES, ONES, start_position=7)
                    raise KeyError("the first")

    asyncio.run(main())
    gc.collect()
    assert not caplog.records  # asyncio complains of exceptions that nobody retrieves


def test_submitting_waits_while_the_stream_is_full(start_server: StartServer) -> None:
    server = start_server()

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            session = await client.create_session(TINY)
            async with client.step_stream(max_in_flight=2) as stream:
                await (await stream.submit(session, 0, ONES, ONES, ONES))
                with stopped(server):
                    pending = [await stream.submit(session, 0, ONES, ONES, ONES) for _ in range(2)]
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(stream.submit(session, 0, ONES, ONES, ONES), 0.2)
                    # A wait that is given up leaves the step on its way.
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(pending[0], 0.1)
                    assert stream.unanswered == pending
                    waiting = [asyncio.create_task(stream.submit(session, 0, ONES, ONES, ONES)) for _ in range(3)]
                after = [await (await task) for task in waiting]
                assert [result.length for result in after] == [4, 5, 6]
                assert (await pending[1]).length == 3
        with pytest.raises(ValueError, match="max_in_flight is 0"):
            client.step_stream(max_in_flight=0)

    asyncio.run(main())


def test_p06_p07_a_stream_ends_by_silence_and_by_a_restart(start_server: StartServer) -> None:
    """Scenarios P06 and P07."""
    server = start_server()

    async def main() -> None:
        async with attnd.aio.Client(server.target, timeout=20) as client:
            session = await client.create_session(TINY)
            broken = client.step_stream()
            await (await broken.submit(session, 0, ONES, ONES, ONES))
            client.timeout = 0.5
            silent = client.step_stream(max_in_flight=1)
            client.timeout = 20
            await asyncio.sleep(0.8)  # an idle stream waits for nothing
            with stopped(server):
                start = time.monotonic()
                placed = await silent.submit(session, 0, ONES, ONES, ONES, start_position=1)
                behind = [asyncio.create_task(silent.submit(session, 0, ONES, ONES, ONES)) for _ in range(3)]
                with pytest.raises(attnd.DeadlineExceeded, match=r"no step for 0\.5 s; it has its start_position"):
                    await placed
                assert time.monotonic() - start > 0.4
                for task in behind:
                    with pytest.raises(attnd.DeadlineExceeded):
                        await task
                await silent.close()
                assert silent.unanswered == [placed]
                appended = await broken.submit(session, 0, ONES, ONES, ONES)
                server.kill()
            with pytest.raises(attnd.Unavailable, match="no start_position"):
                await appended
            assert [placed.repeatable, appended.repeatable] == [True, False]
            await broken.close()
            start_server(listen=server.target)
            await client.server_info(timeout=20)
            async with client.step_stream(timeout=20) as again:
                with pytest.raises(ValueError, match=r"steps \[2\] have no start_position"):
                    await again.repeat([appended])
                [lost] = await again.repeat([placed])
                with pytest.raises(attnd.SessionLost):
                    await lost

    asyncio.run(main())


def test_s09_steps_whose_answers_were_lost_are_repeated(start_server: StartServer) -> None:
    """Scenario S09."""
    server = start_server()
    proxy = LossyProxy(server.target)
    q, k, v = tensors(150)
    expected = reference.attend(q, k, v, causal=True)[0]
    parts = [slice(start, start + 30) for start in range(0, 150, 30)]

    async def main() -> None:
        async with attnd.aio.Client(proxy.target) as client:
            session = await client.create_session(**SHAPE)
            proxy.lose_answer_of(35_000)
            stream = client.step_stream()
            pending = [await stream.submit(session, 0, q[p], k[p], v[p], p.start) for p in parts]
            with pytest.raises(attnd.Unavailable):
                await pending[0]
            assert (proxy.lost, stream.unanswered) == (1, pending)
            for _ in range(20):
                try:
                    async with client.step_stream() as again:
                        results = [await step for step in await again.repeat(stream.unanswered)]
                    break
                except attnd.Unavailable:
                    await asyncio.sleep(0.05)
            assert reference.relative_error(np.concatenate([r.out for r in results]), expected) <= 1e-5
            assert (await session.info()).length == 150

    asyncio.run(main())
    proxy.close()


def test_cancelling_a_task_cancels_what_is_in_flight(start_server: StartServer) -> None:
    server = start_server()
    pending: list[attnd.aio.PendingStep] = []

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client:
            session = await client.create_session(TINY)

            async def work() -> None:
                async with client.step_stream() as stream:
                    pending.append(await stream.submit(session, 0, ONES, ONES, ONES))
                    await asyncio.Event().wait()

            with stopped(server):
                task = asyncio.create_task(work())
                while not pending:
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                with pytest.raises(attnd.Cancelled):
                    await pending[0]
            assert (await session.info()).length in (0, 1)

    asyncio.run(main())


def test_a_forgotten_stream_is_let_go(start_server: StartServer) -> None:
    """Also after steps that failed."""
    server = start_server("--max_streams=1")

    async def main() -> None:
        async with attnd.aio.Client(server.target) as client, await client.create_session(TINY) as session:
            for length in (1, 2):
                stream = client.step_stream()
                with pytest.raises(attnd.BadPosition):
                    await (await stream.submit(session, 0, ONES, ONES, ONES, start_position=9))
                assert (await (await stream.submit(session, 0, ONES, ONES, ONES))).length == length
                del stream
                await asyncio.sleep(0)  # the answer's delivery lets its stream go
                gc.collect()
                assert await asyncio.to_thread(no_stream_threads)

    asyncio.run(main())


def test_a_loop_may_end_before_its_streams(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = start_server()

    async def main() -> attnd.aio.Client:
        client = attnd.aio.Client(server.target)
        session = await client.create_session(TINY)
        await client.step_stream().submit(session, 0, ONES, ONES, ONES)
        return client

    client = asyncio.run(main())
    with attnd.Client(server.target) as plain:
        for _ in range(2000):
            lengths = [info.length for info in plain.list_sessions()]
            if lengths == [1]:
                break
            time.sleep(0.01)
    assert lengths == [1]
    asyncio.run(client.close())
    gc.collect()
    assert not caplog.records


def test_a_forked_child_is_told_that_it_cannot(server: Server) -> None:
    """gRPC's threads for asyncio do not come along. The other client works on both sides."""
    client = attnd.aio.Client(server.target)

    async def version(client: attnd.aio.Client) -> str:
        return (await client.server_info(timeout=20)).version

    expected = asyncio.run(version(client))
    child = os.fork()
    if child == 0:

        def work() -> None:
            for use in (client, attnd.aio.Client(server.target)):
                with pytest.raises(RuntimeError, match=r"forked from one that used attnd\.aio"):
                    asyncio.run(version(use))
            with attnd.Client(server.target) as plain:
                assert plain.server_info(timeout=20).version == expected

        finish_child(work)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(version(client)) == expected
