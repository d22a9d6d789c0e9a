"""A session on the server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from .config import SessionConfig
from .errors import AttndError, SessionLost
from .results import SessionInfo, StepResult
from .steps import Segment, StepTensors, step_request, step_results
from .transfer import FileOrPath

if TYPE_CHECKING:
    from .client import Client


class Session:
    """The cached state of one sequence: K and V of its tokens, per layer. A context manager that closes it.

    Attributes:
        session_id: 128 random bits; ``list_sessions`` shows it to every client that the server lets in.
        config: with its defaults filled in.
    """

    def __init__(self, client: Client, info: SessionInfo) -> None:
        self._client = client
        self.session_id = info.session_id
        self.config: SessionConfig = info.config

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An exception that is under way is the one to report.
        with contextlib.suppress(AttndError) if kind is not None else contextlib.nullcontext():
            self.close()

    def __repr__(self) -> str:
        return f"attnd.Session({self.session_id!r})"

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
        tensors = StepTensors.encode(q, k, v)
        self.check_shapes(tensors)
        request = step_request(
            layer,
            [Segment(self, tensors.num_tokens, start_position, rewind, mask)],
            tensors,
            empty_rows=empty_rows,
            return_lse=return_lse,
            out_dtype=out_dtype,
        )
        return step_results(request, self._client.send_step(request, timeout), tensors)[0]

    def check_shapes(self, tensors: StepTensors) -> None:
        """Raises ValueError when a tensor has not this session's heads and dims."""
        config = self.config
        kv_heads = config.num_q_heads if config.num_kv_heads is None else config.num_kv_heads
        tensors.check_heads(config.num_q_heads, kv_heads, config.head_dim, config.value_dim or config.head_dim)

    def rewind(self, length: int, *, timeout: float | None = None) -> SessionInfo:
        """Cuts every layer that is longer to ``length`` tokens.

        Raises:
            InvalidArgument: BAD_POSITION: beyond the longest layer.
            TokensFreed: the next token would see some that a layer's window has passed.
        """
        return self._client.rewind(self.session_id, length, timeout=timeout)

    def fork(self, length: int | None = None, *, timeout: float | None = None) -> Session:
        """A session of its own with the first ``length`` tokens of this one, or all; see ``Client.fork``."""
        return self._client.fork(self, length, timeout=timeout)

    def info(self, *, timeout: float | None = None) -> SessionInfo:
        return self._client.get_session(self.session_id, timeout=timeout)

    def export(self, target: FileOrPath, *, timeout: float | None = None) -> int:
        """Writes its state to a file for ``Client.import_session``; see ``Client.export_session``."""
        return self._client.export_session(self.session_id, target, timeout=timeout)

    def close(self, *, timeout: float | None = None) -> None:
        """Frees the session. Closing it again, or after it expired or the server lost it, is no error."""
        with contextlib.suppress(SessionLost):
            self._client.close_session(self.session_id, timeout=timeout)
