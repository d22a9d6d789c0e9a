"""Attention in float64, as the wire contract defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    offset: int = 0,
    causal: bool = False,
    mask: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Sequence[float] | None = None,
    alibi_slopes: Sequence[float] | None = None,
) -> tuple[Array, Array, Array]:
    """Attention of q [queries, heads, dim] over k and v [keys, kv_heads, dim], q's first row being at ``offset``.

    Returns:
        out [queries, heads, dim], lse [queries, heads], weights [heads, queries, keys].
    """
    queries, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (x.repeat(heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    i = np.arange(queries)[:, None] + offset
    j = np.arange(keys)[None, :]
    if alibi_slopes is not None:
        scores = scores + np.reshape(alibi_slopes, (heads, 1, 1)) * (j - i)
    allowed = np.ones((queries, keys), dtype=bool)
    if causal:
        allowed &= j <= i
    if window is not None:
        allowed &= j > i - window
    if mask is not None:
        allowed &= mask
    scores = np.where(allowed, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    powers = np.exp(scores - largest)
    total = powers.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.reshape(sinks, (heads, 1, 1)) - largest)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(total > 0, powers / total, 0)
        lse = (largest + np.log(total))[..., 0].T
    return np.einsum("hij,jhd->ihd", weights, v), lse, weights


def relative_error(actual: Array, expected: Array) -> float:
    """The largest ||actual - expected|| / ||expected|| of a row."""
    difference = np.linalg.norm(np.asarray(actual, np.float64) - expected, axis=-1)
    return float((difference / np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)).max())
