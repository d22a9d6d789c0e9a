"""Gradients of stateless attention: the request and the answer of ``Client.attend_backward``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import softmax_options
from .steps import EMPTY_ROWS
from .tensors import Array, choice, decode, encode, encode_mask
from .v1 import attnd_pb2 as pb


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


def backward_request(
    q: Any,
    k: Any,
    v: Any,
    d_out: Any,
    *,
    mask: Any,
    query_offset: int | None,
    empty_rows: str,
    sinks: Sequence[float] | None,
    **softmax: Any,
) -> pb.AttendBackwardRequest:
    """Raises as ``Client.attend_backward`` does before anything is sent."""
    wire = {name: encode(name, value) for name, value in (("q", q), ("k", k), ("v", v), ("d_out", d_out))}
    ranks = {len(tensor.shape) for tensor in wire.values()}
    if ranks not in ({2}, {3}):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in wire.items())
        raise ValueError(f"q, k, v and d_out are all [rows, heads, dim] or all [rows, dim], not {shapes}")
    shape = {name: t.shape if len(t.shape) == 3 else (t.shape[0], 1, t.shape[1]) for name, t in wire.items()}
    (queries, q_heads, head_dim), (keys, kv_heads, k_dim), (v_keys, v_heads, value_dim), out_shape = shape.values()
    if k_dim != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and k has {k_dim}")
    if (v_keys, v_heads) != (keys, kv_heads):
        raise ValueError(f"k has {keys} rows of {kv_heads} heads, v has {v_keys} rows of {v_heads}")
    if out_shape != (queries, q_heads, value_dim):
        raise ValueError(f"d_out is {list(out_shape)}; the output is {[queries, q_heads, value_dim]}")
    return pb.AttendBackwardRequest(
        num_queries=queries,
        num_keys=keys,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        **{name: tensor.message() for name, tensor in wire.items()},
        softmax=softmax_options(sinks=sinks, **softmax),
        query_offset=query_offset,
        mask=None if mask is None else encode_mask("mask", mask, (queries, keys)),
        empty_rows=choice("empty_rows", empty_rows, EMPTY_ROWS),
    )


def backward_result(
    request: pb.AttendBackwardRequest, answer: pb.AttendBackwardResponse, *, one_head: bool
) -> AttendGradients:
    """``one_head``: Q, K and V had no axis for heads, so their gradients have none."""

    def gradient(tensor: pb.Tensor, rows: int, heads: int, dim: int) -> Array:
        return decode(tensor, (rows, dim) if one_head else (rows, heads, dim))

    return AttendGradients(
        d_q=gradient(answer.d_q, request.num_queries, request.num_q_heads, request.head_dim),
        d_k=gradient(answer.d_k, request.num_keys, request.num_kv_heads, request.head_dim),
        d_v=gradient(answer.d_v, request.num_keys, request.num_kv_heads, request.value_dim),
        d_sinks=np.array(answer.d_sinks, np.float32) if request.softmax.sinks else None,
    )
