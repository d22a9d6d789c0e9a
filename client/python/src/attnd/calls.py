"""The attempts of one call, and the rule of what may be repeated.

A call is repeated only where a second execution does no harm: after UNAVAILABLE when it is idempotent (a step with an
explicit start_position is: the server replays it), and after QUEUE_FULL always, because nothing was done.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from .errors import AttndError, QueueFull, Unavailable, error_of_call
from .operation import Operation, Result

UNAVAILABLE_ATTEMPTS = 6
FIRST_DELAY = 0.1  # seconds; doubles


class Attempts:
    """How long each attempt of a call may take, and what happens after one that failed."""

    def __init__(self, timeout: float, *, idempotent: bool) -> None:
        self._deadline = time.monotonic() + timeout
        self._idempotent = idempotent
        self._failed = 0

    def seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def delay_after(self, error: AttndError) -> float:
        """Seconds to wait before the next attempt. Raises ``error`` where there is none."""
        self._failed += 1
        delay = self._delay(error)
        if delay is None or time.monotonic() + delay >= self._deadline:
            raise error
        return delay

    def _delay(self, error: AttndError) -> float | None:
        backoff: float = FIRST_DELAY * 2 ** (self._failed - 1) * random.uniform(0.8, 1.2)
        if isinstance(error, QueueFull):
            return max(error.retry_delay or 0.0, min(backoff, 1.0))
        if isinstance(error, Unavailable) and self._idempotent and self._failed < UNAVAILABLE_ATTEMPTS:
            return max(error.retry_delay or 0.0, backoff)
        return None


def call(
    method: Callable[..., Any], operation: Operation[Result], timeout: float, metadata: tuple[tuple[str, str], ...]
) -> Result:
    """The operation by ``method`` of a stub, within ``timeout`` seconds, repetitions included.

    Raises:
        AttndError: as the server or the transport failed.
    """
    attempts = Attempts(timeout, idempotent=operation.idempotent)
    while True:
        try:
            answer = method(operation.request, timeout=attempts.seconds_left(), metadata=metadata)
        except grpc.RpcError as failure:
            error = error_of_call(failure)
        else:
            return operation.result(answer)
        time.sleep(attempts.delay_after(error))
