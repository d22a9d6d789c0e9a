"""A session's state to a file and back: one message in memory at a time, and no wait without an end."""

from __future__ import annotations

import contextlib
import os
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


class Received:
    """How much of a snapshot has come."""

    def __init__(self) -> None:
        self.bytes = 0
        self._total = 0

    def add(self, response: pb.ExportSessionResponse) -> None:
        self._total = self._total or response.total_bytes
        self.bytes += len(response.data)

    def check_whole(self) -> None:
        if self.bytes == 0 or self.bytes != self._total:
            message = f"the snapshot ended after {self.bytes} of {self._total} bytes"
            raise AttndError(message, code=grpc.StatusCode.DATA_LOSS)


def export_to(channel: Channel, session: Any, target: FileOrPath, timeout: float) -> int:
    """Returns the bytes written."""
    if isinstance(target, str | os.PathLike):
        with written_whole(Path(target)) as file:
            return export_to(channel, session, file, timeout)
    watch = StallWatch(timeout, STALLED)
    request = pb.ExportSessionRequest(session_id=session_id_of(session))
    call = channel.stub().ExportSession(request, metadata=channel.endpoint.metadata)
    received = Received()
    try:
        with watch.over(call.cancel):
            while True:
                watch.wait_begins()
                response = next(call, None)
                watch.wait_ends()
                if response is None:
                    break
                received.add(response)
                target.write(response.data)
    except grpc.RpcError as failure:
        raise watch.error(failure) from None
    finally:
        call.cancel()
    received.check_whole()
    return received.bytes


def import_from(channel: Channel, source: FileOrPath, expected: SessionConfig | None, timeout: float) -> SessionInfo:
    """Returns the state of the new session."""
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            return import_from(channel, file, expected, timeout)
    watch = StallWatch(timeout, STALLED)
    broken: list[BaseException] = []
    wanted = None if expected is None else expected.message()

    def messages() -> Iterator[pb.ImportSessionRequest]:
        first = wanted
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

    call = channel.stub().ImportSession.future(messages(), metadata=channel.endpoint.metadata)
    try:
        with watch.over(call.cancel):
            return SessionInfo.of_message(call.result())
    except (grpc.RpcError, grpc.FutureCancelledError) as failure:
        if broken:
            raise broken[0] from None
        raise watch.error(call if isinstance(failure, grpc.FutureCancelledError) else failure) from None
    finally:
        call.cancel()
