"""What the tests do to servers and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from running_server import Server


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The server stands still, and goes on at the end."""
    pid = server.process.pid
    server.process.send_signal(signal.SIGSTOP)
    try:
        # The signal is on its way for a while: until then a busy machine's server may still answer.
        for task in Path(f"/proc/{pid}/task").iterdir():
            while (task / "stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
                time.sleep(0.01)
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def no_stream_threads(seconds: float = 20) -> bool:
    """Whether the threads of this process's streams end in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(thread.name == "attnd.StepStream" for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


def finish_child(work: Callable[[], None], seconds: int = 30) -> NoReturn:
    """Ends a forked child, which nothing else of the tests belongs to, with 0 if ``work`` raised nothing in time."""
    status = 1
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
