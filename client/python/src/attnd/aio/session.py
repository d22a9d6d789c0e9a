"""A session on the server, for asyncio."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..errors import AttndError, SessionLost
from ..handle import SessionHandle
from ..results import SessionInfo, StepResult
from ..steps import session_step
from ..transfer import FileOrPath

if TYPE_CHECKING:
    from .client import Client


class Session(SessionHandle):
    """As ``attnd.Session``; an asynchronous context manager that closes it.

    Attributes:
        session_id: 128 random bits; ``list_sessions`` shows it to every client that the server lets in.
        config: with its defaults filled in.
    """

    def __init__(self, client: Client, info: SessionInfo) -> None:
        super().__init__(info)
        self._client = client

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An exception that is under way is the one to report.
        with contextlib.suppress(AttndError) if kind is not None else contextlib.nullcontext():
            await self.close()

    async def step(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        start_position: int | None = None,
        rewind: bool = False,
        mask: Any = None,
        return_lse: bool = False,
        *,
        empty_rows: str = "reject",
        out_dtype: str | None = None,
        timeout: float | None = None,
    ) -> StepResult:
        """Appends K and V to a layer and attends Q to all of it; shapes and errors as ``attnd.Session.step``."""
        operation = session_step(
            self,
            layer,
            q,
            k,
            v,
            start_position=start_position,
            rewind=rewind,
            mask=mask,
            return_lse=return_lse,
            empty_rows=empty_rows,
            out_dtype=out_dtype,
        )
        return await self._client.run(operation, timeout)

    async def rewind(self, length: int, *, timeout: float | None = None) -> SessionInfo:
        """Cuts every layer that is longer to ``length`` tokens; errors as ``attnd.Session.rewind``."""
        return await self._client.rewind(self, length, timeout=timeout)

    async def fork(self, length: int | None = None, *, timeout: float | None = None) -> Session:
        """A session of its own with the first ``length`` tokens of this one, or all; see ``attnd.Client.fork``."""
        return await self._client.fork(self, length, timeout=timeout)

    async def info(self, *, timeout: float | None = None) -> SessionInfo:
        return await self._client.get_session(self, timeout=timeout)

    async def export(self, target: FileOrPath, *, timeout: float | None = None) -> int:
        """Writes its state to a file for ``Client.import_session``; see ``attnd.Client.export_session``."""
        return await self._client.export_session(self, target, timeout=timeout)

    async def close(self, *, timeout: float | None = None) -> None:
        """Frees the session. Closing it again, or after it expired or the server lost it, is no error."""
        with contextlib.suppress(SessionLost):
            await self._client.close_session(self, timeout=timeout)
