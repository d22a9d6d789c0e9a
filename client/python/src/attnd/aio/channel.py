"""One gRPC channel in the event loop that uses it, made at its first call."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import Any

import grpc.aio

from ..endpoint import Endpoint
from ..v1 import attnd_pb2_grpc

# grpc.aio has one polling thread, which does not come along into a forked child and is not started again there: a call
# would crash it, and so would the end of a channel.
_used = False
_forked_from_user = False
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_inherited: list[Any] = []


class Channel:
    """Belongs to one event loop at a time: to the first that uses it, until that is closed or ``close`` is awaited."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: Any = None
        self._stub: Any = None
        _channels.add(self)

    def __reduce__(self) -> tuple[type[Channel], tuple[Endpoint]]:
        return Channel, (self.endpoint,)

    def stub(self) -> Any:
        """The service's stub. Raises RuntimeError outside of a coroutine, and in another loop than the client's."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("an attnd.aio.Client is used in coroutines: no event loop is running here") from None
        if self._loop is loop:
            return self._stub
        if _forked_from_user:
            raise RuntimeError(
                "this process was forked from one that used attnd.aio, which gRPC does not support: start it by spawn, "
                "or use attnd.Client in it"
            )
        with self._lock:
            self._check_free(loop)
            global _used
            _used = True
            self._channel = self.endpoint.open(grpc.aio)
            self._stub = attnd_pb2_grpc.AttentionStub(self._channel)
            self._loop = loop
            return self._stub

    async def close(self) -> None:
        """Closes the connection; a later call opens another, in whatever loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._check_free(loop)
            channel, mine = self._channel, self._loop is loop
            self._loop = self._channel = self._stub = None
        if mine:
            await channel.close()

    def _check_free(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and self._loop is not loop and not self._loop.is_closed():
            raise RuntimeError(
                "this attnd.aio.Client is in use in another event loop; close it there, or make one for each loop"
            )

    def forget_parent(self) -> None:
        """In a forked child: the lock may be held by a thread that did not come along."""
        _inherited.append((self._channel, self._stub))
        self._lock = threading.Lock()
        self._loop = self._channel = self._stub = None


def _forget_parents() -> None:
    global _forked_from_user
    _forked_from_user = _forked_from_user or _used
    for channel in list(_channels):
        channel.forget_parent()


os.register_at_fork(after_in_child=_forget_parents)
