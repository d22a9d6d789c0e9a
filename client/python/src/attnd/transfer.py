"""A session's state to a file and back: one message in memory at a time, and no wait without an end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import grpc

from .channel import Channel
from .config import SessionConfig
from .errors import AttndError
from .handle import session_id_of
from .results import SessionInfo
from .stall import StallWatch
from .v1 import attnd_pb2 as pb

PIECE_BYTES = 1 << 20
STALLED = "the server did not go on with the transfer"

FileOrPath = str | os.PathLike[str] | IO[bytes]


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


class Transfer:
    """One export or import. ``cancel`` may come from another thread, at any time."""

    def __init__(self, channel: Channel, timeout: float) -> None:
        self._channel = channel
        self._watch = StallWatch(timeout, STALLED)
        self._lock = threading.Lock()
        self._call: Any = None
        self._cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()

    def export_to(self, session: Any, target: FileOrPath) -> int:
        """Returns the bytes written."""
        if isinstance(target, str | os.PathLike):
            with written_whole(Path(target)) as file:
                return self.export_to(session, file)
        request = pb.ExportSessionRequest(session_id=session_id_of(session))
        call = self._started(self._channel.stub().ExportSession(request, metadata=self._channel.endpoint.metadata))
        total = received = 0
        try:
            with self._watch.over(call.cancel):
                while True:
                    self._watch.wait_begins()
                    response = next(call, None)
                    self._watch.wait_ends()
                    if response is None:
                        break
                    total = total or response.total_bytes
                    received += len(response.data)
                    target.write(response.data)
        except grpc.RpcError as failure:
            raise self._watch.error(failure) from None
        finally:
            call.cancel()
        if received == 0 or received != total:
            message = f"the snapshot ended after {received} of {total} bytes"
            raise AttndError(message, code=grpc.StatusCode.DATA_LOSS)
        return received

    def import_from(self, source: FileOrPath, expected: SessionConfig | None) -> SessionInfo:
        """Returns the state of the new session."""
        if isinstance(source, str | os.PathLike):
            with open(source, "rb") as file:
                return self.import_from(file, expected)
        wanted = None if expected is None else expected.message()
        broken: list[BaseException] = []

        def messages() -> Iterator[pb.ImportSessionRequest]:
            first = wanted
            try:
                while True:
                    self._watch.wait_ends()
                    data = source.read(PIECE_BYTES)
                    self._watch.wait_begins()
                    if not data and first is None:
                        return
                    yield pb.ImportSessionRequest(data=data, expected=first)
                    first = None
            except Exception as error:
                broken.append(error)
                raise

        method = self._channel.stub().ImportSession
        call = self._started(method.future(messages(), metadata=self._channel.endpoint.metadata))
        try:
            with self._watch.over(call.cancel):
                return SessionInfo.of_message(call.result())
        except (grpc.RpcError, grpc.FutureCancelledError) as failure:
            if broken:
                raise broken[0] from None
            raise self._watch.error(call if isinstance(failure, grpc.FutureCancelledError) else failure) from None
        finally:
            call.cancel()

    def _started(self, call: Any) -> Any:
        with self._lock:
            self._call = call
            if self._cancelled:
                call.cancel()
        return call
