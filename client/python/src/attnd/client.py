"""The synchronous client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .backward import AttendGradients, backward_request, backward_result
from .calls import call
from .channel import Channel
from .config import SessionConfig, softmax_options
from .results import AttendResult, ServerInfo, SessionInfo, StepResult
from .session import Session
from .steps import EMPTY_ROWS, Segment, StepTensors, is_replayable, session_id_of, step_request, step_results
from .tensors import DTYPES, KV_DTYPES, choice, decode, encode, encode_mask
from .transfer import FileOrPath, export_to, import_from
from .v1 import attnd_pb2 as pb

DEFAULT_TIMEOUT = 30.0


class Client:
    """A connection to an attnd server. Thread-safe; usable on both sides of a fork; a context manager.

    Args:
        target: "host:port".
        token: sent as ``authorization: Bearer TOKEN`` with every call. Without TLS it travels in clear.
        tls_roots: use TLS, trusting these certificates (PEM bytes, or the path of a file); True: the system's.
        timeout: seconds, the deadline of every call that names no other.

    Every call raises a subclass of ``attnd.AttndError``. What can be repeated without harm is repeated, within the
    deadline, when the server is unavailable: everything but creating, forking, rewinding and reordering sessions, and a
    step that does not say its start_position.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls_roots: str | os.PathLike[str] | bytes | bool | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}; seconds > 0 are needed")
        self.timeout = timeout
        self._channel = Channel(target, token, tls_roots)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"attnd.Client({self._channel.target!r})"

    def close(self) -> None:
        """Closes the connection. Open sessions stay on the server until their time to live ends."""
        self._channel.close()

    # ---- stateless ------------------------------------------------------------------------------------------------

    def attend(
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
        """Attention over the given Q, K and V; the server keeps nothing.

        Args:
            q: [num_queries, num_q_heads, head_dim], or [num_queries, head_dim] for one head (then K and V as well).
            k: [num_keys, num_kv_heads, head_dim].
            v: [num_keys, num_kv_heads, value_dim].
            causal: query i sees keys up to its own position; with unequal counts it needs query_offset.
            mask: bool [num_queries, num_keys], True where attention is allowed.
            scale: of the scores; None: 1 / sqrt(head_dim).
            window: keys that a query sees, itself included.
            softcap: softcap * tanh(score / softcap).
            sinks: per query head, a score that joins the softmax's denominator only.
            alibi_slopes: per query head.
            query_offset: position of the first query among the keys.
            empty_rows: a query that sees no key: "reject" or "zero".
            kv_dtype: compute as a session of that dtype would: "f32", "bf16", "f16" or "int8".
            out_dtype: "f32", "bf16" or "f16"; None: Q's.

        Raises:
            TypeError, ValueError: dtypes and shapes that cannot be sent.
            InvalidArgument: BAD_SHAPE, NOT_FINITE, EMPTY_ROW, SCORE_OVERFLOW.
        """
        wire = {name: encode(name, value) for name, value in (("q", q), ("k", k), ("v", v))}
        ranks = {name: len(tensor.shape) for name, tensor in wire.items()}
        if set(ranks.values()) not in ({2}, {3}):
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in wire.items())
            raise ValueError(f"q, k and v are all [rows, heads, dim] or all [rows, dim], not {shapes}")
        one_head = ranks["q"] == 2
        shape = {name: (t.shape[0], 1, t.shape[1]) if one_head else t.shape for name, t in wire.items()}
        (queries, q_heads, head_dim), (keys, kv_heads, k_dim), (v_keys, v_heads, value_dim) = shape.values()
        if k_dim != head_dim:
            raise ValueError(f"q has head_dim {head_dim} and k has {k_dim}")
        if (v_keys, v_heads) != (keys, kv_heads):
            raise ValueError(f"k has {keys} rows of {kv_heads} heads, v has {v_keys} rows of {v_heads}")
        request = pb.AttendRequest(
            num_queries=queries,
            num_keys=keys,
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            **{name: tensor.message() for name, tensor in wire.items()},
            softmax=softmax_options(
                scale=scale, softcap=softcap, causal=causal, window=window, alibi_slopes=alibi_slopes, sinks=sinks
            ),
            query_offset=query_offset,
            mask=None if mask is None else encode_mask("mask", mask, (queries, keys)),
            empty_rows=choice("empty_rows", empty_rows, EMPTY_ROWS),
            kv_dtype=choice("kv_dtype", kv_dtype, KV_DTYPES),
            out_dtype=pb.DTYPE_UNSPECIFIED if out_dtype is None else choice("out_dtype", out_dtype, DTYPES),
            return_lse=return_lse,
            return_weights=return_weights,
        )
        answer: pb.AttendResponse = self._call("Attend", request, timeout, idempotent=True)
        out_shape = (queries, value_dim) if one_head else (queries, q_heads, value_dim)
        return AttendResult(
            out=decode(answer.out, out_shape),
            lse=decode(answer.lse, (queries, q_heads)) if return_lse else None,
            weights=decode(answer.weights, (q_heads, queries, keys)) if return_weights else None,
        )

    def attend_backward(
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
        """The gradients of ``(d_out * attend(q, k, v, ...).out).sum()`` with respect to Q, K, V and the sinks.

        Nothing of a forward call is needed. The relative error of each gradient as a whole is at most 1e-5 against
        float64 on the numbers as sent.

        Args:
            q, k, v: as in ``attend``.
            d_out: [num_queries, num_q_heads, value_dim], the gradient of the output.

        The options are those of ``attend``.

        Raises:
            TypeError, ValueError: dtypes and shapes that cannot be sent.
            InvalidArgument: BAD_SHAPE, NOT_FINITE, EMPTY_ROW; GRADIENT_OVERFLOW: beyond float32's range.
        """
        request = backward_request(
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
        answer: pb.AttendBackwardResponse = self._call("AttendBackward", request, timeout, idempotent=True)
        return backward_result(request, answer, one_head=np.ndim(q) == 2)

    # ---- sessions -------------------------------------------------------------------------------------------------

    def create_session(
        self, config: SessionConfig | None = None, *, timeout: float | None = None, **fields: Any
    ) -> Session:
        """A new session, from a ``SessionConfig`` or from its fields::

            with client.create_session(num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128) as session:
                result = session.step(0, q, k, v)

        Raises:
            InvalidArgument: BAD_CONFIG: heads that do not divide, a dim outside 1..256, a window of 0.
            SessionLimit, CacheFull: no place for it.
        """
        if config is None:
            config = SessionConfig(**fields)
        elif fields:
            raise TypeError(f"a config and its fields ({', '.join(fields)}) were both given")
        request = pb.CreateSessionRequest(config=config.message())
        return Session(self, SessionInfo.of_message(self._call("CreateSession", request, timeout, idempotent=False)))

    def step(
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
        """One layer of many sessions in one call: appends K and V, attends Q.

        Args:
            layer: 0 to num_layers - 1.
            segments: each session's part; all sessions have the same heads and dims.
            q: [tokens, num_q_heads, head_dim], the segments one after the other along the tokens; None: append only.
            k: [tokens, num_kv_heads, head_dim]; None (and V None): attend only.
            v: [tokens, num_kv_heads, value_dim].

        Returns:
            A result per segment. With more than one segment a part's failure is its result's ``error``, and reading
            that result's ``out`` raises it; the other parts are done.
        """
        if not segments:
            raise ValueError("a step has at least one segment")
        tensors = StepTensors.encode(q, k, v)
        tokens = sum(segment.num_tokens for segment in segments)
        if tensors.num_tokens != tokens:
            raise ValueError(f"the segments have {tokens} tokens and the tensors {tensors.num_tokens}")
        for segment in segments:
            if isinstance(segment.session_id, Session):
                segment.session_id.check_shapes(tensors)
        request = step_request(
            layer, segments, tensors, empty_rows=empty_rows, return_lse=return_lse, out_dtype=out_dtype
        )
        return step_results(request, self.send_step(request, timeout), tensors)

    def send_step(self, request: pb.StepRequest, timeout: float | None = None) -> pb.StepResponse:
        """A step as messages of the wire, for callers with tensors of their own kind."""
        answer: pb.StepResponse = self._call("Step", request, timeout, idempotent=is_replayable(request))
        return answer

    def rewind(self, session_id: str, length: int, *, timeout: float | None = None) -> SessionInfo:
        """Cuts every layer that is longer to ``length`` tokens."""
        request = pb.RewindSessionRequest(session_id=session_id, length=length)
        return SessionInfo.of_message(self._call("RewindSession", request, timeout, idempotent=False))

    def fork(self, session: Session | str, length: int | None = None, *, timeout: float | None = None) -> Session:
        """A new session that begins with the first ``length`` tokens of each layer of another.

        Nothing is copied: both share their blocks until one writes. It comes behind the other's queued steps, has the
        same configuration but reserves nothing, and is never asked for twice.

        Args:
            session: a ``Session`` or its id.
            length: in tokens; of a shorter layer, all. None: all of every layer.

        Raises:
            InvalidArgument: BAD_POSITION: negative, or beyond the longest layer.
            TokensFreed: the next token would see some that a layer's window has passed.
            SessionLost, SessionLimit.
        """
        request = pb.ForkSessionRequest(session_id=session_id_of(session), length=length)
        return Session(self, SessionInfo.of_message(self._call("ForkSession", request, timeout, idempotent=False)))

    def reorder(
        self, sessions: Sequence[Session | str], sources: Sequence[int], *, timeout: float | None = None
    ) -> list[int]:
        """Beam search: each session takes the tokens of another, all at once and without copying.

        It comes behind the queued steps of all of them, and is never asked for twice.

        Args:
            sessions: rows, as ``Session`` or id, each once.
            sources: as many: row i takes the tokens that row sources[i] has. A row may be the source of several.

        Returns:
            The length of each row's longest layer, in tokens.

        Raises:
            InvalidArgument: BAD_SHAPE, DUPLICATE_SESSION; BAD_CONFIG: configurations that differ in more than
                max_tokens, ttl and reserve_tokens.
            TooLong: beyond the taker's max_tokens.
            SessionLost: one of them; every session is as before, as after the other errors.
        """
        request = pb.ReorderSessionsRequest(session_ids=map(session_id_of, sessions), sources=sources)
        return list(self._call("ReorderSessions", request, timeout, idempotent=False).lengths)

    def get_session(self, session_id: str, *, timeout: float | None = None) -> SessionInfo:
        request = pb.GetSessionRequest(session_id=session_id)
        return SessionInfo.of_message(self._call("GetSession", request, timeout, idempotent=True))

    def list_sessions(self, *, page_size: int = 100, timeout: float | None = None) -> Iterator[SessionInfo]:
        """All sessions in the order of their creation, a page of ``page_size`` (at most 1000) per call."""
        token = ""
        while True:
            request = pb.ListSessionsRequest(page_size=page_size, page_token=token)
            answer: pb.ListSessionsResponse = self._call("ListSessions", request, timeout, idempotent=True)
            yield from map(SessionInfo.of_message, answer.sessions)
            token = answer.next_page_token
            if not token:
                return

    def close_session(self, session_id: str, *, timeout: float | None = None) -> bool:
        """Frees a session; whether it was open. Raises SessionLost for an id that never existed."""
        request = pb.CloseSessionRequest(session_id=session_id)
        return bool(self._call("CloseSession", request, timeout, idempotent=True).was_open)

    def export_session(self, session_id: str, target: FileOrPath, *, timeout: float | None = None) -> int:
        """Writes a session's state to a file, by its path or open for binary writing; returns the bytes written.

        A path has its new content only once it is complete. The session may be stepped meanwhile; the snapshot is of
        one moment. ``timeout`` is the longest wait for a piece, however long all of them take.

        Raises:
            SessionLost, Unavailable, DeadlineExceeded, and OSError where the file cannot be written.
        """
        timeout = self.timeout if timeout is None else timeout
        return export_to(self._channel.stub().ExportSession, session_id, target, self._channel.metadata, timeout)

    def import_session(
        self, source: FileOrPath, *, expected: SessionConfig | None = None, timeout: float | None = None
    ) -> Session:
        """A new session from such a file, of this server or of another, all or nothing.

        Args:
            source: a path, or a file open for binary reading.
            expected: num_layers, heads, dims and kv_dtype that the session must have.
            timeout: the longest wait for the server to take some bytes, or to answer.

        Raises:
            InvalidArgument: BAD_SNAPSHOT: damaged, incomplete or of another format; BAD_CONFIG: not as expected.
            SessionLimit, CacheFull, TooManyTokens: no place for it.
        """
        timeout = self.timeout if timeout is None else timeout
        wanted = None if expected is None else expected.message()
        answer = import_from(self._channel.stub().ImportSession, source, wanted, self._channel.metadata, timeout)
        return Session(self, SessionInfo.of_message(answer))

    def server_info(self, config: SessionConfig | None = None, *, timeout: float | None = None) -> ServerInfo:
        """What the server is and how full; with a config, how many tokens of such a session fit."""
        request = pb.GetServerInfoRequest(config=None if config is None else config.message())
        return ServerInfo.of_message(self._call("GetServerInfo", request, timeout, idempotent=True))

    def _call(self, name: str, request: Any, timeout: float | None, *, idempotent: bool) -> Any:
        return call(
            getattr(self._channel.stub(), name),
            request,
            timeout=self.timeout if timeout is None else timeout,
            metadata=self._channel.metadata,
            idempotent=idempotent,
        )
