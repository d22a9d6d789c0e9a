"""Giving up a call of many messages that does not go on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from .errors import AttndError, DeadlineExceeded, error_of_call


class StallWatch:
    """Cancels a call that has not gone on for ``timeout`` seconds. How long it takes in all is a matter of its size."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._message = message
        self._end = threading.Event()
        self._deadline: float | None = None  # None: nothing is waited for
        self.stalled = False

    @contextlib.contextmanager
    def over(self, cancel: Callable[[], object]) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, args=(cancel,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def wait_begins(self) -> None:
        self._deadline = time.monotonic() + self._timeout

    def wait_ends(self) -> None:
        self._deadline = None

    def error(self, failure: Any) -> AttndError:
        """Of a failed call (a ``grpc.RpcError``)."""
        return stall_error(self._message, self._timeout) if self.stalled else error_of_call(failure)

    def _watch(self, cancel: Callable[[], object]) -> None:
        # Nobody needs to wake this thread when a wait begins: no deadline that is set while it sleeps comes earlier
        # than the end of its sleep.
        left = self._timeout
        while not self._end.wait(left):
            deadline = self._deadline
            left = self._timeout if deadline is None else deadline - time.monotonic()
            if left <= 0:
                self.stalled = True
                cancel()
                return


def stall_error(message: str, timeout: float) -> AttndError:
    return DeadlineExceeded(f"{message} for {timeout} s", code=grpc.StatusCode.DEADLINE_EXCEEDED)
