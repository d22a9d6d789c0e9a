"""The calls that send a stream of messages, in threads.

grpc.aio loses the status of such a call: when the server ends it while a message is on its way, grpc.aio replaces the
server's reason by an INTERNAL of its own (seen with grpcio 1.85: in 129 of 300 imports of a damaged snapshot). So these
go over a connection of ``grpc``, whose threads hand their results to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..errors import AttndError
from ..transfer import Transfer

Value = TypeVar("Value")


async def run_transfer(
    transfer: Transfer, work: Callable[[], Value], undo: Callable[[Value], Awaitable[object]] | None = None
) -> Value:
    """``work``, which is a method of ``transfer``, in a thread. A cancelled task cancels it.

    Args:
        undo: what to do with a result that came as the task was cancelled.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        transfer.cancel()
        await asyncio.wait([running])
        if running.exception() is None and undo is not None:  # else it is the cancellation
            with contextlib.suppress(AttndError):
                await undo(running.result())
        raise
