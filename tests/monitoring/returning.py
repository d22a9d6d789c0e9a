"""Clients whose sessions are on disk between their steps."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np

import attnd


class Returning:
    """Clients that come back now and then: more of them than the cache holds, so that each is on disk meanwhile."""

    SESSIONS, TOKENS, PAUSE_SECONDS = 40, 256, 0.4  # 20 MiB in all

    def __init__(self, target: str) -> None:
        self.error: Exception | None = None
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with attnd.Client(self._target) as client, contextlib.ExitStack() as stack:
                sessions = [
                    stack.enter_context(client.create_session(num_layers=1, num_q_heads=4, num_kv_heads=4, head_dim=64))
                    for _ in range(self.SESSIONS)
                ]
                for number in itertools.count():
                    session, tokens = sessions[number % self.SESSIONS], self.TOKENS if number < self.SESSIONS else 1
                    session.step(0, *(np.full((tokens, 4, 64), number % self.SESSIONS, np.float32) for _ in range(3)))
                    if self._stop.wait(self.PAUSE_SECONDS if number >= self.SESSIONS else 0):
                        return
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
