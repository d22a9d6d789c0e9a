"""One call with its deadline, and the rule of what may be repeated.

A call is repeated only where a second execution does no harm: after UNAVAILABLE when it is idempotent (a step with an
explicit start_position is: the server replays it), and after QUEUE_FULL always, because nothing was done.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from .errors import AttndError, QueueFull, Unavailable, error_of_call

Answer = TypeVar("Answer")

UNAVAILABLE_ATTEMPTS = 6
FIRST_DELAY = 0.1  # seconds; doubles


def call(
    method: Callable[..., Answer],
    request: Any,
    *,
    timeout: float,
    metadata: tuple[tuple[str, str], ...],
    idempotent: bool,
) -> Answer:
    """``method(request)`` within ``timeout`` seconds, repetitions included.

    Raises:
        AttndError: as the server or the transport failed.
    """
    deadline = time.monotonic() + timeout
    attempt = 0
    while True:
        try:
            return method(request, timeout=max(deadline - time.monotonic(), 0.001), metadata=metadata)
        except grpc.RpcError as failure:
            error = error_of_call(failure)
        attempt += 1
        delay = _delay_before_retry(error, attempt, idempotent)
        if delay is None or time.monotonic() + delay >= deadline:
            raise error
        time.sleep(delay)


def _delay_before_retry(error: AttndError, attempt: int, idempotent: bool) -> float | None:
    """Seconds to wait before the next attempt; None: do not try again."""
    backoff: float = FIRST_DELAY * 2 ** (attempt - 1) * random.uniform(0.8, 1.2)
    if isinstance(error, QueueFull):
        return max(error.retry_delay or 0.0, min(backoff, 1.0))
    if isinstance(error, Unavailable) and idempotent and attempt < UNAVAILABLE_ATTEMPTS:
        return max(error.retry_delay or 0.0, backoff)
    return None
