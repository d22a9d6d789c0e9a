"""What a session is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf import duration_pb2

from .tensors import KV_DTYPES, choice
from .v1 import attnd_pb2 as pb

_KV_NAMES = {code: name for name, code in KV_DTYPES.items()}


def softmax_options(
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool | None = None,
    window: int | None = None,
    alibi_slopes: Sequence[float] | None = None,
    sinks: Sequence[float] | None = None,
) -> pb.SoftmaxOptions:
    """None is "not set", which is not the same as 0."""
    return pb.SoftmaxOptions(
        softmax_scale=scale,
        softcap=softcap,
        causal=causal,
        window=window,
        alibi_slopes=None if alibi_slopes is None else [float(slope) for slope in alibi_slopes],
        sinks=None if sinks is None else [float(sink) for sink in sinks],
    )


def duration(seconds: float) -> duration_pb2.Duration:
    nanos = round(seconds * 1e9)
    return duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


@dataclass(frozen=True)
class SessionConfig:
    """The shape of a session's cache, and its softmax.

    Attributes:
        num_q_heads: a multiple of num_kv_heads; query head h reads kv head h // (num_q_heads // num_kv_heads).
        head_dim: of Q and K, 1 to 256.
        num_layers: 1 to 1024.
        num_kv_heads: None: num_q_heads.
        value_dim: of V, 1 to 256; None: head_dim.
        kv_dtype: how K and V are stored: "f32", "bf16", "f16" or "int8".
        scale: of the scores before the softmax; None: 1 / sqrt(head_dim).
        softcap: softcap * tanh(score / softcap), > 0.
        causal: None: yes.
        window: tokens that a query sees, itself included, >= 1.
        alibi_slopes, sinks: one per query head.
        layer_windows: one per layer, None or 0 where that layer has none; overrides window.
        max_tokens: longest length of a layer; None: as the cache allows.
        ttl: seconds of idleness after which the session expires; None: the server's.
        reserve_tokens: cache memory taken at once for this many tokens of every layer.
    """

    num_q_heads: int
    head_dim: int
    num_layers: int = 1
    num_kv_heads: int | None = None
    value_dim: int | None = None
    kv_dtype: str = "f32"
    scale: float | None = None
    softcap: float | None = None
    causal: bool | None = None
    window: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None
    layer_windows: tuple[int | None, ...] | None = None
    max_tokens: int | None = None
    ttl: float | None = None
    reserve_tokens: int = 0

    def message(self) -> pb.SessionConfig:
        """Raises ValueError for an unknown kv_dtype; everything else is the server's to judge."""
        return pb.SessionConfig(
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_q_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim or 0,
            kv_dtype=choice("kv_dtype", self.kv_dtype, KV_DTYPES),
            softmax=softmax_options(
                scale=self.scale,
                softcap=self.softcap,
                causal=self.causal,
                window=self.window,
                alibi_slopes=self.alibi_slopes,
                sinks=self.sinks,
            ),
            layer_windows=[window or 0 for window in self.layer_windows or ()],
            max_tokens=self.max_tokens or 0,
            ttl=None if self.ttl is None else duration(self.ttl),
            reserve_tokens=self.reserve_tokens,
        )

    @staticmethod
    def of_message(config: pb.SessionConfig) -> SessionConfig:
        softmax = config.softmax

        def optional(field: str) -> float | None:
            return getattr(softmax, field) if softmax.HasField(field) else None

        return SessionConfig(
            num_q_heads=config.num_q_heads,
            head_dim=config.head_dim,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            value_dim=config.value_dim or config.head_dim,
            kv_dtype=_KV_NAMES.get(config.kv_dtype, "f32"),
            scale=optional("softmax_scale"),
            softcap=optional("softcap"),
            causal=softmax.causal if softmax.HasField("causal") else None,
            window=softmax.window if softmax.HasField("window") else None,
            alibi_slopes=tuple(softmax.alibi_slopes) or None,
            sinks=tuple(softmax.sinks) or None,
            layer_windows=tuple(window or None for window in config.layer_windows) or None,
            max_tokens=config.max_tokens or None,
            ttl=config.ttl.ToTimedelta().total_seconds() if config.HasField("ttl") else None,
            reserve_tokens=config.reserve_tokens,
        )
