"""What the calls answer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from .config import SessionConfig
from .errors import AttndError
from .tensors import Array
from .v1 import attnd_pb2 as pb


@dataclass(frozen=True)
class AttendResult:
    """Attributes:
    out: [num_queries, num_q_heads, value_dim]; [num_queries, value_dim] when Q, K and V had two dimensions.
    lse: float32 [num_queries, num_q_heads], natural log, or None when it was not asked for.
    weights: float32 [num_q_heads, num_queries, num_keys], or None when they were not asked for.
    """

    out: Array
    lse: Array | None
    weights: Array | None


@dataclass(frozen=True)
class AttendGradients:
    """Gradients of ``(d_out * out).sum()``, float32.

    Attributes:
        d_q: the shape of Q.
        d_k: the shape of K.
        d_v: the shape of V.
        d_sinks: [num_q_heads], or None where there were no sinks.
    """

    d_q: Array
    d_k: Array
    d_v: Array
    d_sinks: Array | None


@dataclass(frozen=True)
class StepResult:
    """One session's part of a step.

    Attributes:
        start_position: of its first token.
        length: of the layer after the step, in tokens.
        error: why this part failed; its session is as before.
        queue_seconds, compute_seconds: where the whole step's time went in the server.
    """

    start_position: int
    length: int
    queue_seconds: float
    compute_seconds: float
    error: AttndError | None
    _out: Array | None
    _lse: Array | None

    @property
    def out(self) -> Array:
        """[num_tokens, num_q_heads, value_dim]. Raises the part's error, or ValueError after a step without Q."""
        return self._needed(self._out, "out: the step had no Q")

    @property
    def lse(self) -> Array:
        """float32 [num_tokens, num_q_heads], natural log. Raises as ``out``, or when it was not asked for."""
        return self._needed(self._lse, "lse: the step had no return_lse=True")

    def _needed(self, array: Array | None, missing: str) -> Array:
        if self.error is not None:
            raise self.error
        if array is None:
            raise ValueError(f"no {missing}")
        return array


@dataclass(frozen=True)
class SessionInfo:
    """A session's state, never its contents. Times in seconds, sizes in bytes.

    Attributes:
        length: of the longest layer, in tokens.
        layer_lengths: in tokens, one per layer.
        layer_first_tokens: position of the oldest token that each layer still holds; not 0 where a window passed some.
        used_bytes: of cache blocks, whole blocks counted; reserved_bytes >= used_bytes.
        spilled_bytes: of its file while it is on disk (used_bytes is 0 then); its next step brings it back.
        idle_time: since its last step ended.
        time_to_live: until it expires if it stays idle.
    """

    session_id: str
    config: SessionConfig
    length: int
    layer_lengths: tuple[int, ...]
    layer_first_tokens: tuple[int, ...]
    used_bytes: int
    reserved_bytes: int
    spilled_bytes: int
    create_time: datetime
    idle_time: float
    time_to_live: float

    @staticmethod
    def of_message(session: pb.Session) -> SessionInfo:
        return SessionInfo(
            session_id=session.session_id,
            config=SessionConfig.of_message(session.config),
            length=session.length,
            layer_lengths=tuple(session.layer_lengths),
            layer_first_tokens=tuple(session.layer_first_tokens),
            used_bytes=session.used_bytes,
            reserved_bytes=session.reserved_bytes,
            spilled_bytes=session.spilled_bytes,
            create_time=session.create_time.ToDatetime(tzinfo=timezone.utc),
            idle_time=session.idle_time.ToTimedelta().total_seconds(),
            time_to_live=session.time_to_live.ToTimedelta().total_seconds(),
        )


@dataclass(frozen=True)
class ServerInfo:
    """What the server is, its limits and how full it is. Sizes in bytes.

    Attributes:
        isa: e.g. "avx512_core_amx"; kernel_paths: kv_dtype -> how it is computed.
        bytes_per_token, tokens_capacity, tokens_available: of a session of the config that was asked about (all
            layers; in an empty cache; one more session now); 0 without one.
    """

    version: str
    isa: str
    onednn_version: str
    kernel_paths: dict[str, str]
    compute_threads: int
    block_tokens: int
    max_message_bytes: int
    max_queue_tokens: int
    max_sessions: int
    sessions_active: int
    kv_cache_capacity_bytes: int
    kv_cache_reserved_bytes: int
    kv_cache_used_bytes: int
    session_idle_ttl: float
    draining: bool
    bytes_per_token: int
    tokens_capacity: int
    tokens_available: int

    @staticmethod
    def of_message(info: pb.ServerInfo) -> ServerInfo:
        plain = {
            field.name: getattr(info, field.name)
            for field in info.DESCRIPTOR.fields
            if field.name not in ("kernel_paths", "session_idle_ttl") and field.name in ServerInfo.__annotations__
        }
        ttl = info.session_idle_ttl.ToTimedelta().total_seconds()
        return ServerInfo(kernel_paths=dict(info.kernel_paths), session_idle_ttl=ttl, **plain)
