"""The stateless calls: Q, K and V of one request, and how attention, or its gradients, are computed over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import softmax_options
from .operation import Operation
from .results import AttendGradients, AttendResult
from .tensors import DTYPES, EMPTY_ROWS, KV_DTYPES, WireTensor, choice, decode, encode, encode_mask
from .v1 import attnd_pb2 as pb


@dataclass(frozen=True)
class Inputs:
    """Q, K and V as they are sent, and the shape that they agree on.

    Attributes:
        one_head: they came as [rows, dim], and so does what is answered.
    """

    q: WireTensor
    k: WireTensor
    v: WireTensor
    num_queries: int
    num_keys: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    one_head: bool

    @staticmethod
    def encode(q: Any, k: Any, v: Any) -> Inputs:
        """Raises TypeError or ValueError for dtypes that cannot be sent and shapes that disagree."""
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
        return Inputs(wire["q"], wire["k"], wire["v"], queries, keys, q_heads, kv_heads, head_dim, value_dim, one_head)

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.one_head:
            return (self.num_queries, self.value_dim)
        return (self.num_queries, self.num_q_heads, self.value_dim)

    def fields(self) -> dict[str, Any]:
        """The fields of a request that say what is attended."""
        return {
            "num_queries": self.num_queries,
            "num_keys": self.num_keys,
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "q": self.q.message(),
            "k": self.k.message(),
            "v": self.v.message(),
        }

    def options(
        self,
        *,
        causal: bool,
        mask: Any,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Sequence[float] | None,
        alibi_slopes: Sequence[float] | None,
        query_offset: int | None,
        empty_rows: str,
    ) -> dict[str, Any]:
        """The fields of a request that say how it is attended."""
        return {
            "softmax": softmax_options(
                scale=scale, softcap=softcap, causal=causal, window=window, alibi_slopes=alibi_slopes, sinks=sinks
            ),
            "query_offset": query_offset,
            "mask": None if mask is None else encode_mask("mask", mask, (self.num_queries, self.num_keys)),
            "empty_rows": choice("empty_rows", empty_rows, EMPTY_ROWS),
        }


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    kv_dtype: str,
    out_dtype: str | None,
    return_lse: bool,
    return_weights: bool,
    **options: Any,
) -> Operation[AttendResult]:
    """``options`` as ``Inputs.options`` takes them."""
    inputs = Inputs.encode(q, k, v)
    request = pb.AttendRequest(
        **inputs.fields(),
        **inputs.options(**options),
        kv_dtype=choice("kv_dtype", kv_dtype, KV_DTYPES),
        out_dtype=pb.DTYPE_UNSPECIFIED if out_dtype is None else choice("out_dtype", out_dtype, DTYPES),
        return_lse=return_lse,
        return_weights=return_weights,
    )
    queries, keys, heads = inputs.num_queries, inputs.num_keys, inputs.num_q_heads

    def result(answer: pb.AttendResponse) -> AttendResult:
        return AttendResult(
            out=decode(answer.out, inputs.out_shape),
            lse=decode(answer.lse, (queries, heads)) if return_lse else None,
            weights=decode(answer.weights, (heads, queries, keys)) if return_weights else None,
        )

    return Operation("Attend", request, result, idempotent=True)


def attend_backward(q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> Operation[AttendGradients]:
    """``options`` as ``Inputs.options`` takes them."""
    inputs = Inputs.encode(q, k, v)
    wire = encode("d_out", d_out)
    if wire.shape != inputs.out_shape:
        raise ValueError(f"d_out is {list(wire.shape)}; the output is {list(inputs.out_shape)}")
    request = pb.AttendBackwardRequest(**inputs.fields(), **inputs.options(**options), d_out=wire.message())

    def result(answer: pb.AttendBackwardResponse) -> AttendGradients:
        return AttendGradients(
            d_q=decode(answer.d_q, inputs.q.shape),
            d_k=decode(answer.d_k, inputs.k.shape),
            d_v=decode(answer.d_v, inputs.v.shape),
            d_sinks=np.array(answer.d_sinks, np.float32) if request.softmax.sinks else None,
        )

    return Operation("AttendBackward", request, result, idempotent=True)
