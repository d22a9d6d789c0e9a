"""A session on the server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from .errors import AttndError, SessionLost
from .handle import SessionHandle
from .results import SessionInfo, StepResult
from .steps import session_step
from .transfer import FileOrPath

if TYPE_CHECKING:
    from .client import Client


class Session(SessionHandle):
    """The cached state of one sequence: K and V of its tokens, per layer. A context manager that closes it.

    Attributes:
        session_id: 128 random bits; ``list_sessions`` shows it to every client that the server lets in.
        config: with its defaults filled in.
    """

    def __init__(self, client: Client, info: SessionInfo) -> None:
        super().__init__(info)
        self._client = client

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An exception that is under way is the one to report.
        with contextlib.suppress(AttndError) if kind is not None else contextlib.nullcontext():
            self.close()

    def step(
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
        """Appends K and V to a layer and attends Q to all of it.

        Args:
            layer: 0 to num_layers - 1.
            q: [tokens, num_q_heads, head_dim]; None: append only.
            k: [tokens, num_kv_heads, head_dim]; None (and V None): attend only.
            v: [tokens, num_kv_heads, value_dim].
            start_position, rewind, mask: as in ``Segment``. With a start_position a lost answer is asked for again.
            empty_rows: a query that sees no key: "reject" or "zero".
            out_dtype: "f32", "bf16" or "f16"; None: Q's.

        Raises:
            TypeError, ValueError: dtypes and shapes that cannot be sent, or that are not the session's.
            SessionLost, BadPosition, TokensFreed, CacheFull, TooManyTokens, InvalidArgument: the session is as before.
        """
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
        return self._client.run(operation, timeout)

    def rewind(self, length: int, *, timeout: float | None = None) -> SessionInfo:
        """Cuts every layer that is longer to ``length`` tokens.

        Raises:
            InvalidArgument: BAD_POSITION: beyond the longest layer.
            TokensFreed: the next token would see some that a layer's window has passed.
        """
        return self._client.rewind(self, length, timeout=timeout)

    def fork(self, length: int | None = None, *, timeout: float | None = None) -> Session:
        """A session of its own with the first ``length`` tokens of this one, or all; see ``Client.fork``."""
        return self._client.fork(self, length, timeout=timeout)

    def info(self, *, timeout: float | None = None) -> SessionInfo:
        return self._client.get_session(self, timeout=timeout)

    def export(self, target: FileOrPath, *, timeout: float | None = None) -> int:
        """Writes its state to a file for ``Client.import_session``; see ``Client.export_session``."""
        return self._client.export_session(self, target, timeout=timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Frees the session. Closing it again, or after it expired or the server lost it, is no error."""
        with contextlib.suppress(SessionLost):
            self._client.close_session(self, timeout=timeout)
