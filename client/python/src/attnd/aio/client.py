"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from .. import channel as threads
from .. import management, stateless, steps
from ..client import DEFAULT_TIMEOUT
from ..config import SessionConfig
from ..endpoint import Endpoint, TlsRoots
from ..operation import Operation, Result
from ..pipeline import Pipeline
from ..results import AttendGradients, AttendResult, ServerInfo, SessionInfo, StepResult
from ..steps import Segment
from ..transfer import FileOrPath, Transfer
from .calls import call
from .channel import Channel
from .session import Session
from .stream import StepStream
from .threads import run_transfer


class Client:
    """A connection to an attnd server, as ``attnd.Client``; an asynchronous context manager.

    It may be made anywhere and connects at its first call, in the event loop of that call. Until this loop is closed,
    or ``close`` was awaited, a call from another loop is a RuntimeError. So is one in a process that was forked from
    one that had used this module.

    Args:
        target: "host:port".
        token: sent as ``authorization: Bearer TOKEN`` with every call. Without TLS it travels in clear.
        tls_roots: use TLS, trusting these certificates (PEM bytes, or the path of a file); True: the system's.
        timeout: seconds, the deadline of every call that names no other.

    Errors and repetitions as ``attnd.Client``. Cancelling a task cancels the call that it waits for: a step is then
    either done as a whole or not at all.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls_roots: TlsRoots = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}; seconds > 0 are needed")
        self.timeout = timeout
        self._channel = Channel(Endpoint(target, token, tls_roots))
        self._threads_channel = threads.Channel(self._channel.endpoint)  # see .threads

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"attnd.aio.Client({self._channel.endpoint.target!r})"

    async def close(self) -> None:
        """Closes the connection. Open sessions stay on the server until their time to live ends."""
        await self._channel.close()
        self._threads_channel.close()

    # ---- stateless ------------------------------------------------------------------------------------------------

    async def attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        mask: Any = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Sequence[float] | None = None,
        alibi_slopes: Sequence[float] | None = None,
        query_offset: int | None = None,
        empty_rows: str = "reject",
        kv_dtype: str = "f32",
        out_dtype: str | None = None,
        return_lse: bool = False,
        return_weights: bool = False,
        timeout: float | None = None,
    ) -> AttendResult:
        """Attention over the given Q, K and V; shapes, options and errors as ``attnd.Client.attend``."""
        operation = stateless.attend(
            q,
            k,
            v,
            causal=causal,
            mask=mask,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            query_offset=query_offset,
            empty_rows=empty_rows,
            kv_dtype=kv_dtype,
            out_dtype=out_dtype,
            return_lse=return_lse,
            return_weights=return_weights,
        )
        return await self.run(operation, timeout)

    async def attend_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        d_out: Any,
        *,
        causal: bool = False,
        mask: Any = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Sequence[float] | None = None,
        alibi_slopes: Sequence[float] | None = None,
        query_offset: int | None = None,
        empty_rows: str = "reject",
        timeout: float | None = None,
    ) -> AttendGradients:
        """Gradients of the same; shapes, options and errors as ``attnd.Client.attend_backward``."""
        operation = stateless.attend_backward(
            q,
            k,
            v,
            d_out,
            causal=causal,
            mask=mask,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            query_offset=query_offset,
            empty_rows=empty_rows,
        )
        return await self.run(operation, timeout)

    # ---- sessions -------------------------------------------------------------------------------------------------

    async def create_session(
        self, config: SessionConfig | None = None, *, timeout: float | None = None, **fields: Any
    ) -> Session:
        """A new session, from a ``SessionConfig`` or from its fields; errors as ``attnd.Client.create_session``."""
        return Session(self, await self.run(management.create_session(config, fields), timeout))

    async def step(
        self,
        layer: int,
        segments: Sequence[Segment],
        q: Any,
        k: Any,
        v: Any,
        *,
        empty_rows: str = "reject",
        return_lse: bool = False,
        out_dtype: str | None = None,
        timeout: float | None = None,
    ) -> list[StepResult]:
        """One layer of many sessions in one call; shapes, results and errors as ``attnd.Client.step``."""
        operation = steps.step(
            layer, segments, q, k, v, empty_rows=empty_rows, return_lse=return_lse, out_dtype=out_dtype
        )
        return await self.run(operation, timeout)

    def step_stream(self, *, max_in_flight: int = 8, timeout: float | None = None) -> StepStream:
        """A stream for steps that are sent before earlier ones are answered; see ``StepStream``. Not a coroutine.

        Args:
            max_in_flight: steps that are sent and not answered; submitting more waits. The server reads 64 at most.
            timeout: seconds without any answer, while steps are in flight, after which the stream is given up.
        """
        self._channel.stub()  # in the client's loop, or not at all
        timeout = self.timeout if timeout is None else timeout
        return StepStream(Pipeline(self._threads_channel, max_in_flight, timeout), max_in_flight)

    async def rewind(self, session: Session | str, length: int, *, timeout: float | None = None) -> SessionInfo:
        """Cuts every layer that is longer to ``length`` tokens; errors as ``attnd.Session.rewind``."""
        return await self.run(management.rewind(session, length), timeout)

    async def fork(self, session: Session | str, length: int | None = None, *, timeout: float | None = None) -> Session:
        """A new session that begins with the first ``length`` tokens of each layer; see ``attnd.Client.fork``."""
        return Session(self, await self.run(management.fork(session, length), timeout))

    async def reorder(
        self, sessions: Sequence[Session | str], sources: Sequence[int], *, timeout: float | None = None
    ) -> list[int]:
        """Beam search: row i takes the tokens that row sources[i] has; see ``attnd.Client.reorder``."""
        return await self.run(management.reorder(sessions, sources), timeout)

    async def get_session(self, session: Session | str, *, timeout: float | None = None) -> SessionInfo:
        """Its state, never its contents. Raises SessionLost."""
        return await self.run(management.get_session(session), timeout)

    async def list_sessions(self, *, page_size: int = 100, timeout: float | None = None) -> AsyncIterator[SessionInfo]:
        """All sessions in the order of their creation, a page of ``page_size`` (at most 1000) per call."""
        token = ""
        while True:
            infos, token = await self.run(management.list_sessions(page_size, token), timeout)
            for info in infos:
                yield info
            if not token:
                return

    async def close_session(self, session: Session | str, *, timeout: float | None = None) -> bool:
        """Frees a session; whether it was open. Raises SessionLost for an id that never existed."""
        return await self.run(management.close_session(session), timeout)

    async def export_session(self, session: Session | str, target: FileOrPath, *, timeout: float | None = None) -> int:
        """Writes a session's state to a file, in threads, and returns the bytes; as ``attnd.Client.export_session``."""
        transfer = Transfer(self._threads_channel, self.timeout if timeout is None else timeout)
        return await run_transfer(transfer, lambda: transfer.export_to(session, target))

    async def import_session(
        self, source: FileOrPath, *, expected: SessionConfig | None = None, timeout: float | None = None
    ) -> Session:
        """A new session from such a file, all or nothing; arguments and errors as ``attnd.Client.import_session``."""
        transfer = Transfer(self._threads_channel, self.timeout if timeout is None else timeout)
        info = await run_transfer(
            transfer,
            lambda: transfer.import_from(source, expected),
            undo=lambda unwanted: self.close_session(unwanted.session_id),
        )
        return Session(self, info)

    async def server_info(self, config: SessionConfig | None = None, *, timeout: float | None = None) -> ServerInfo:
        """What the server is and how full; with a config, how many tokens of such a session fit."""
        return await self.run(management.server_info(config), timeout)

    async def run(self, operation: Operation[Result], timeout: float | None = None) -> Result:
        """An operation of this package's own making, with this client's deadline and repetitions."""
        method = getattr(self._channel.stub(), operation.method)
        timeout = self.timeout if timeout is None else timeout
        return await call(method, operation, timeout, self._channel.endpoint.metadata)
