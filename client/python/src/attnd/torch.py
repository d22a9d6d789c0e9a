"""Differentiable attention for torch, computed by an attnd server, forward and backward.

::

    import attnd, attnd.torch

    client = attnd.Client("127.0.0.1:50051")
    out = attnd.torch.attention(query, key, value, client=client, causal=True)   # [batch, heads, tokens, dim]
    out.sum().backward()                                                         # query.grad, key.grad, value.grad
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from .client import Client
from .endpoint import MESSAGE_BYTES
from .errors import TooManyTokens
from .results import AttendGradients
from .tensors import Array

MAX_HEADS = 1024  # of a call: the server's limit
OVERHEAD_BYTES = 64 << 10  # what a message holds beside its tensors

T = TypeVar("T")

_message_bytes: weakref.WeakKeyDictionary[Client, int] = weakref.WeakKeyDictionary()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    client: Client,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | Sequence[float] | None = None,
    alibi_slopes: torch.Tensor | Sequence[float] | None = None,
    query_offset: int | None = None,
    empty_rows: str = "reject",
) -> torch.Tensor:
    """Attention in the layout of ``torch.nn.functional.scaled_dot_product_attention``, differentiable once.

    The server computes in float32 (its gradients' scores in float64): float64 tensors are rounded to float32 on their
    way, bfloat16 and float16 are exact there. A batch is one call: its dimensions are folded into the heads. Where that
    is more than a message may hold, than the server has scratch memory for, or than 1024 heads, it is split; so is a
    mask that differs along the batch.

    Args:
        query: [..., num_q_heads, num_queries, head_dim], on any device.
        key: [..., num_kv_heads, num_keys, head_dim]; query head h reads key head h // (num_q_heads // num_kv_heads).
        value: [..., num_kv_heads, num_keys, value_dim].
        causal: query i sees keys up to its own position; with unequal counts it needs query_offset.
        mask: bool, True where attention is allowed: [num_queries, num_keys], or [..., 1, num_queries, num_keys] with
            batch dimensions that expand to query's.
        scale: of the scores; None: 1 / sqrt(head_dim).
        window: keys that a query sees, itself included.
        softcap: softcap * tanh(score / softcap).
        sinks: [num_q_heads], a score that joins the softmax's denominator only; a tensor gets its gradient.
        alibi_slopes: [num_q_heads]; no gradient.
        query_offset: position of the first query among the keys.
        empty_rows: a query that sees no key: "reject", or "zero" (then it gives and gets no gradient).

    Returns:
        [..., num_q_heads, num_queries, value_dim] in query's dtype, on query's device.

    Raises:
        TypeError: tensors of unlike dtypes, or not of floating point; a mask that is not bool.
        ValueError: shapes that disagree.
        InvalidArgument: as ``Client.attend`` and ``Client.attend_backward``.
        RuntimeError: in a backward pass with create_graph=True: there is no second derivative.
    """
    _check(query, key, value)
    heads = query.shape[-3]
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        sinks = torch.tensor(sinks, dtype=torch.float32)
    if isinstance(alibi_slopes, torch.Tensor):
        if alibi_slopes.requires_grad:
            raise ValueError("alibi_slopes requires a gradient, and there is none; detach it")
        alibi_slopes = alibi_slopes.tolist()
    for name, values in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if values is not None and len(values) != heads:
            raise ValueError(f"{name} has {len(values)} values; query has {heads} heads")
    options = {
        "causal": causal,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "query_offset": query_offset,
        "empty_rows": empty_rows,
    }
    call = _Call(client, options, None if alibi_slopes is None else list(alibi_slopes), _batch_masks(mask, query, key))
    out: torch.Tensor = _Attention.apply(query, key, value, sinks, call)
    return out


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; one floating point dtype for all is needed")
        if tensor.dim() < 3 or tensor.shape[:-3] != query.shape[:-3]:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise ValueError(f"[..., heads, tokens, dim] with the same batch dimensions is needed, not {shapes}")
        if tensor.numel() == 0:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, which holds nothing")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"query has head_dim {query.shape[-1]} and key has {key.shape[-1]}")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(f"key has [heads, tokens] {list(key.shape[-3:-1])}, value has {list(value.shape[-3:-1])}")
    if query.shape[-3] % key.shape[-3] != 0:
        raise ValueError(f"query has {query.shape[-3]} heads, which {key.shape[-3]} key heads do not divide")


def _batch_masks(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> list[Array | None]:
    """One mask for the whole batch, or one for each of its members."""
    if mask is None:
        return [None]
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}; bool is needed, True where attention is allowed")
    pairs = (query.shape[-2], key.shape[-2])
    if tuple(mask.shape[-2:]) != pairs or (mask.dim() > 2 and mask.shape[-3] != 1):
        raise ValueError(f"mask has shape {list(mask.shape)}; [..., 1, {pairs[0]}, {pairs[1]}] is needed")
    if all(size == 1 for size in mask.shape[:-2]):
        return [mask.reshape(pairs).cpu().numpy()]
    try:
        members = mask.squeeze(-3).expand(*query.shape[:-3], *pairs)
    except RuntimeError:
        raise ValueError(
            f"mask has shape {list(mask.shape)}, which does not expand to query's batch {list(query.shape[:-3])}"
        ) from None
    return list(members.reshape(-1, *pairs).cpu().numpy())


class _Part(NamedTuple):
    """Heads of a folded batch that make one call."""

    q_heads: slice
    kv_heads: slice
    mask: Array | None


@dataclass(frozen=True)
class _Call:
    client: Client
    options: dict[str, Any]
    alibi_slopes: list[float] | None
    masks: list[Array | None]

    def map(self, q: Array, k: Array, v: Array, work: Callable[[_Part], T]) -> list[T]:
        """``work`` for cuts of the folded tensors [tokens, heads, dim] along their heads, the masks' members apart.

        The server does not tell how much scratch memory a call may take, so where it says that it is too much, the cuts
        are halved.
        """
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        most = self._heads_of_a_message(q, k, v)
        member_heads = kv_heads // len(self.masks)
        results = []
        for member, mask in enumerate(self.masks):
            begin, end = member * member_heads, (member + 1) * member_heads
            while begin < end:
                kv = slice(begin, min(begin + most, end))
                try:
                    results.append(work(_Part(slice(kv.start * group, kv.stop * group), kv, mask)))
                except TooManyTokens:
                    most = (kv.stop - kv.start) // 2
                    if most == 0:
                        raise
                else:
                    begin = kv.stop
        return results

    def _heads_of_a_message(self, q: Array, k: Array, v: Array) -> int:
        """KV heads, with their query heads, that a call may have, by the size of its messages and by their number."""
        group = q.shape[1] // k.shape[1]
        # The larger message is the backward one's request: q, k, v, d_out, and the mask's bits.
        row_floats = group * len(q) * (q.shape[2] + v.shape[2]) + len(k) * (k.shape[2] + v.shape[2])
        mask_bytes = 0 if self.masks[0] is None else -(-len(q) * len(k) // 8)
        room = min(_max_message_bytes(self.client), MESSAGE_BYTES) - OVERHEAD_BYTES - mask_bytes
        heads: int = min(room // (4 * row_floats), MAX_HEADS // group)
        return max(1, heads)

    def arguments(self, part: _Part, sinks: Array | None) -> dict[str, Any]:
        """The options of a part's call."""
        arguments = dict(self.options, mask=part.mask)
        heads = range(part.q_heads.start, part.q_heads.stop)
        if self.alibi_slopes is not None:
            arguments["alibi_slopes"] = [self.alibi_slopes[head % len(self.alibi_slopes)] for head in heads]
        if sinks is not None:
            arguments["sinks"] = [sinks[head % len(sinks)] for head in heads]
        return arguments


def _max_message_bytes(client: Client) -> int:
    known = _message_bytes.get(client)
    if known is None:
        known = _message_bytes[client] = client.server_info().max_message_bytes
    return known


def _fold(tensor: torch.Tensor) -> Array:
    """[..., heads, tokens, dim] to float32 [tokens, batch * heads, dim]."""
    rows = tensor.detach().reshape(-1, *tensor.shape[-2:]).transpose(0, 1)
    return rows.to(device="cpu", dtype=torch.float32).contiguous().numpy()


def _unfold(parts: list[Array], shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """The parts' heads, [tokens, heads, dim] each, as a tensor of ``shape`` [..., heads, tokens, dim]."""
    rows = [torch.from_numpy(part).transpose(0, 1) for part in parts]
    return torch.cat(rows).reshape(shape).to(device=like.device, dtype=like.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        call: _Call,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.call = call
        q, k, v = _fold(query), _fold(key), _fold(value)
        wire_sinks = None if sinks is None else sinks.detach().float().cpu().numpy()

        def attend(part: _Part) -> Array:
            return call.client.attend(
                q[:, part.q_heads], k[:, part.kv_heads], v[:, part.kv_heads], **call.arguments(part, wire_sinks)
            ).out

        outs = call.map(q, k, v, attend)
        return _unfold(outs, torch.Size((*query.shape[:-1], value.shape[-1])), query)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # torch's once_differentiable lets a graph through whose d_out needs no gradient, and it would be cut here.
        if torch.is_grad_enabled():
            raise RuntimeError("attnd.torch.attention has no second derivative: create_graph=True cannot be honoured")
        query, key, value, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        q, k, v, folded_d_out = _fold(query), _fold(key), _fold(value), _fold(d_out)
        wire_sinks = None if sinks is None else sinks.detach().float().cpu().numpy()

        def attend_backward(part: _Part) -> AttendGradients:
            return call.client.attend_backward(
                q[:, part.q_heads],
                k[:, part.kv_heads],
                v[:, part.kv_heads],
                folded_d_out[:, part.q_heads],
                **call.arguments(part, wire_sinks),
            )

        gradients = call.map(q, k, v, attend_backward)
        d_sinks = None
        if sinks is not None:
            by_head = torch.cat([torch.from_numpy(part.d_sinks) for part in gradients]).double()
            d_sinks = by_head.reshape(-1, len(sinks)).sum(0).to(device=sinks.device, dtype=sinks.dtype)
        return (
            _unfold([part.d_q for part in gradients], query.shape, query),
            _unfold([part.d_k for part in gradients], key.shape, key),
            _unfold([part.d_v for part in gradients], value.shape, value),
            d_sinks,
            None,
        )
