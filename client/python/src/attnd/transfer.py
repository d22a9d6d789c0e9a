"""A session's state to a file and back: one message in memory at a time, and no wait without an end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import grpc

from .errors import AttndError, DeadlineExceeded, error_of_call
from .v1 import attnd_pb2 as pb

PIECE_BYTES = 1 << 20

FileOrPath = str | os.PathLike[str] | IO[bytes]


class StallWatch:
    """Cancels a call that has not gone on for ``timeout`` seconds. How long it takes in all is a matter of its size."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._deadline: float | None = None  # None: nothing is waited for
        self._ended = False
        self.stalled = False

    @contextlib.contextmanager
    def over(self, cancel: Callable[[], object]) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, args=(cancel,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()
            thread.join()

    def wait_begins(self) -> None:
        self._set(time.monotonic() + self._timeout)

    def wait_ends(self) -> None:
        self._set(None)

    def error(self, failure: grpc.RpcError) -> AttndError:
        if not self.stalled:
            return error_of_call(failure)
        message = f"the server did not go on with the transfer for {self._timeout} s"
        return DeadlineExceeded(message, code=grpc.StatusCode.DEADLINE_EXCEEDED)

    def _set(self, deadline: float | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _watch(self, cancel: Callable[[], object]) -> None:
        with self._changed:
            while not self._ended:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    self.stalled = True
                    break
                self._changed.wait(left)
        if self.stalled:
            cancel()


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes ``path``'s place once it is complete and on the disk; until then, and after an error, what was
    there stays."""
    temporary = path.with_name(path.name + ".tmp")
    file = open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def export_to(method: Any, session_id: str, target: FileOrPath, metadata: Any, timeout: float) -> int:
    """Returns the bytes written."""
    if isinstance(target, str | os.PathLike):
        with written_whole(Path(target)) as file:
            return export_to(method, session_id, file, metadata, timeout)
    watch = StallWatch(timeout)
    call = method(pb.ExportSessionRequest(session_id=session_id), metadata=metadata)
    total = received = 0
    try:
        with watch.over(call.cancel):
            while True:
                watch.wait_begins()
                response = next(call, None)
                watch.wait_ends()
                if response is None:
                    break
                total = total or response.total_bytes
                received += len(response.data)
                target.write(response.data)
    except grpc.RpcError as failure:
        raise watch.error(failure) from None
    finally:
        call.cancel()
    if received == 0 or received != total:
        message = f"the snapshot ended after {received} of {total} bytes"
        raise AttndError(message, code=grpc.StatusCode.DATA_LOSS)
    return received


def import_from(method: Any, source: FileOrPath, expected: Any, metadata: Any, timeout: float) -> Any:
    """Returns the message of the new session."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            return import_from(method, file, expected, metadata, timeout)
    watch = StallWatch(timeout)
    broken: list[BaseException] = []

    def messages() -> Iterator[pb.ImportSessionRequest]:
        first = expected
        try:
            while True:
                watch.wait_ends()
                data = source.read(PIECE_BYTES)
                watch.wait_begins()
                if not data and first is None:
                    return
                yield pb.ImportSessionRequest(data=data, expected=first)
                first = None
        except Exception as error:
            broken.append(error)
            raise

    call = method.future(messages(), metadata=metadata)
    try:
        with watch.over(call.cancel):
            return call.result()
    except (grpc.RpcError, grpc.FutureCancelledError) as failure:
        if broken:
            raise broken[0] from None
        raise watch.error(call if isinstance(failure, grpc.FutureCancelledError) else failure) from None
    finally:
        call.cancel()
