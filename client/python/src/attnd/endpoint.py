"""Where the server is, and how a connection to it is made: the same for both kinds of channel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc

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

TlsRoots = str | os.PathLike[str] | bytes | bool | None


class Endpoint:
    """Immutable; it can be pickled, and then holds the token.

    Args:
        target: "host:port".
        token: sent as ``authorization: Bearer TOKEN`` with every call. Without TLS it travels in clear.
        tls_roots: use TLS, trusting these certificates (PEM bytes, or the path of a file); True: the system's.
    """

    def __init__(self, target: str, token: str | None, tls_roots: TlsRoots) -> None:
        self.target = target
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._roots = _read_roots(tls_roots)
        self._tls = tls_roots is not None and tls_roots is not False

    def open(self, library: Any) -> Any:
        """A channel of ``grpc`` or of ``grpc.aio``."""
        if self._tls:
            return library.secure_channel(self.target, grpc.ssl_channel_credentials(self._roots), options=OPTIONS)
        return library.insecure_channel(self.target, options=OPTIONS)


def _read_roots(roots: TlsRoots) -> bytes | None:
    if roots is None or isinstance(roots, bool):
        return None
    return roots if isinstance(roots, bytes) else Path(roots).read_bytes()
