"""One gRPC channel per process, made at its first call."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import grpc

from .v1 import attnd_pb2_grpc

MESSAGE_BYTES = 64 << 20

# Keepalive notices a dead connection during calls that wait longer than their peer is silent; its timeout is no shorter
# than a call's default, so that a server that only stands still is reported as DEADLINE_EXCEEDED.
# Reconnecting is tried at once and often: a restarted server should not be refused for the default's 20 seconds.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Connections are not shared with other channels of the process: a forked child's channel to the same server would
    # find its parent's dead one ("Wrong file descriptor generation").
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are the client's: only it knows which calls are safe to repeat.
    ("grpc.enable_retries", 0),
)

# Channels that a fork brought along. They belong to the parent's connections and threads: a child neither uses them nor
# lets them be destroyed, which would wait for threads that do not exist in it.
_inherited: list[Any] = []


class Channel:
    """Thread-safe. After a fork the child opens a connection of its own."""

    def __init__(self, target: str, token: str | None, tls_roots: str | os.PathLike[str] | bytes | bool | None) -> None:
        self.target = target
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._roots = _read_roots(tls_roots)
        self._tls = tls_roots is not None and tls_roots is not False
        self._lock = threading.Lock()
        self._pid = 0
        self._channel: Any = None
        self._stub: Any = None

    def stub(self) -> Any:
        """The service's stub on this process's channel."""
        if self._pid == os.getpid():
            stub = self._stub
            if stub is not None:
                return stub
        with self._lock:
            if self._pid != os.getpid():
                if self._channel is not None:
                    _inherited.append((self._channel, self._stub))
                self._channel, self._stub, self._pid = None, None, os.getpid()
            if self._stub is None:
                self._channel = self._open()
                self._stub = attnd_pb2_grpc.AttentionStub(self._channel)
            return self._stub

    def close(self) -> None:
        """Closes the connection; a later call opens another."""
        with self._lock:
            if self._pid == os.getpid() and self._channel is not None:
                self._channel.close()
                self._channel, self._stub = None, None

    def _open(self) -> Any:
        if self._tls:
            return grpc.secure_channel(self.target, grpc.ssl_channel_credentials(self._roots), options=OPTIONS)
        return grpc.insecure_channel(self.target, options=OPTIONS)


def _read_roots(roots: str | os.PathLike[str] | bytes | bool | None) -> bytes | None:
    if roots is None or isinstance(roots, bool):
        return None
    return roots if isinstance(roots, bytes) else Path(roots).read_bytes()
