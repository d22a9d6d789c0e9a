"""One gRPC channel per process, made at its first call."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import grpc

from .endpoint import Endpoint
from .v1 import attnd_pb2_grpc

# Held while any channel is opened or closed, and while the process forks: a child would be left with half of it.
# Reentrant, because anything made meanwhile may start the collector, whose finalizers close other clients.
_lifecycle = threading.RLock()
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()

# Channels that a fork brought along. They belong to the parent's connections and threads: a child neither uses them nor
# lets them be destroyed, which would wait for threads that do not exist in it.
_inherited: list[Any] = []


class Channel:
    """Thread-safe. After a fork the child opens a connection of its own, and so does whoever unpickles it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._channel: Any = None
        self._stub: Any = None
        _channels.add(self)

    def __reduce__(self) -> tuple[type[Channel], tuple[Endpoint]]:
        return Channel, (self.endpoint,)

    def stub(self) -> Any:
        """The service's stub on this process's channel."""
        stub = self._stub
        if stub is not None:
            return stub
        with _lifecycle:
            if self._stub is None:
                channel = self.endpoint.open(grpc)
                self._channel, self._stub = channel, attnd_pb2_grpc.AttentionStub(channel)
            return self._stub

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        with _lifecycle:
            channel, self._channel, self._stub = self._channel, None, None
            if channel is not None:
                channel.close()

    def forget_parent(self) -> None:
        """In a forked child."""
        if self._channel is not None:
            _inherited.append((self._channel, self._stub))
            self._channel, self._stub = None, None


def _after_fork_in_child() -> None:
    _lifecycle.release()
    for channel in list(_channels):
        channel.forget_parent()


os.register_at_fork(before=_lifecycle.acquire, after_in_parent=_lifecycle.release, after_in_child=_after_fork_in_child)
