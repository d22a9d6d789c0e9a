"""A session's state to a file and back; the file is read and written in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TypeVar

import grpc

from ..config import SessionConfig
from ..errors import error_of_call
from ..handle import session_id_of
from ..results import SessionInfo
from ..stall import stall_error
from ..transfer import PIECE_BYTES, STALLED, FileOrPath, Received, written_whole
from ..v1 import attnd_pb2 as pb
from .channel import Channel

Value = TypeVar("Value")


async def export_to(channel: Channel, session: Any, target: FileOrPath, timeout: float) -> int:
    """Returns the bytes written."""
    if isinstance(target, str | os.PathLike):
        async with _in_threads(written_whole(Path(target))) as file:
            return await export_to(channel, session, file, timeout)
    request = pb.ExportSessionRequest(session_id=session_id_of(session))
    call = channel.stub().ExportSession(request, metadata=channel.endpoint.metadata)
    received = Received()
    try:
        while True:
            response = await _within(timeout, call.read())
            if response is grpc.aio.EOF:
                break
            received.add(response)
            await asyncio.to_thread(target.write, response.data)
    except grpc.RpcError as failure:
        raise error_of_call(failure) from None
    finally:
        call.cancel()
    received.check_whole()
    return received.bytes


async def import_from(
    channel: Channel, source: FileOrPath, expected: SessionConfig | None, timeout: float
) -> SessionInfo:
    """Returns the state of the new session."""
    if isinstance(source, str | os.PathLike):
        async with _in_threads(open(source, "rb")) as file:
            return await import_from(channel, file, expected, timeout)
    first = None if expected is None else expected.message()
    call = channel.stub().ImportSession(metadata=channel.endpoint.metadata)
    try:
        # A server that refuses what it has seen ends the call before it was sent all: its answer says why.
        with contextlib.suppress(asyncio.InvalidStateError):
            while True:
                data = await asyncio.to_thread(source.read, PIECE_BYTES)
                if not data and first is None:
                    break
                await _within(timeout, call.write(pb.ImportSessionRequest(data=data, expected=first)))
                first = None
            await call.done_writing()
        return SessionInfo.of_message(await _within(timeout, call))
    except grpc.RpcError as failure:
        raise error_of_call(failure) from None
    finally:
        call.cancel()


async def _within(timeout: float, operation: Awaitable[Value]) -> Value:
    try:
        return await asyncio.wait_for(operation, timeout)
    except asyncio.TimeoutError:
        raise stall_error(STALLED, timeout) from None


@contextlib.asynccontextmanager
async def _in_threads(manager: AbstractContextManager[IO[bytes]]) -> AsyncIterator[IO[bytes]]:
    file = await asyncio.to_thread(manager.__enter__)
    try:
        yield file
    except BaseException as error:
        await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)
