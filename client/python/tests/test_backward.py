"""Gradients against torch's own, of the same formula in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from running_server import Server

import attnd
import attnd.torch

ERROR = 1e-5  # of each gradient as a whole
torch.set_num_threads(1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: Sequence[float] | None = None,
    query_offset: int = 0,
    empty_rows: str = "reject",
) -> torch.Tensor:
    """The wire contract's formula in torch, in the layout of its scaled_dot_product_attention."""
    heads, queries, dim = query.shape[-3:]
    group = heads // key.shape[-3]
    key, value = (x.repeat_interleave(group, dim=-3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(queries)[:, None] + query_offset
    j = torch.arange(key.shape[-2])[None, :]
    if alibi_slopes is not None:
        scores = scores + torch.tensor(alibi_slopes, dtype=scores.dtype)[:, None, None] * (j - i)
    allowed = torch.ones(queries, key.shape[-2], dtype=torch.bool)
    if causal:
        allowed = allowed & (j <= i)
    if window is not None:
        allowed = allowed & (j > i - window)
    if mask is not None:
        allowed = allowed & mask
    scores = scores.masked_fill(~allowed, -1e30)
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return weights.masked_fill(~allowed, 0) @ value


def tensors(*batch: int, q_heads: int, kv_heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    """float64 with values of float32, so that nothing is lost on the way to the server."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = ((q_heads, queries, 24), (kv_heads, keys, 24), (kv_heads, keys, 40))
    return [torch.randn(*batch, *shape, generator=generator).double().requires_grad_() for shape in shapes]


def relative_error(actual: Any, expected: torch.Tensor) -> float:
    difference = torch.as_tensor(actual).double() - expected
    return float(difference.norm() / expected.norm())


MASK = torch.rand(50, 70, generator=torch.Generator().manual_seed(1)) < 0.5
MASK[:, 0] = True
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True, "query_offset": 20},
    "mask": {"mask": MASK},
    "scale": {"scale": 0.3},
    "window": {"window": 7, "query_offset": 20},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0, 1.0, -3.0]},
    "alibi": {"query_offset": 20, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0]},
    "all": {
        "causal": True,
        "query_offset": 20,
        "mask": MASK,
        "scale": 0.2,
        "window": 40,
        "softcap": 3.0,
        "sinks": [0.125] * 6,
        "alibi_slopes": [0.0625] * 6,
        "empty_rows": "zero",
    },
}


def expected_gradients(
    inputs: list[torch.Tensor], d_out: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sinks = options.get("sinks")
    if sinks is not None:
        sinks = torch.tensor(sinks, dtype=torch.float64, requires_grad=True)
    out = attention(*inputs, **(options | {"sinks": sinks}))
    wanted = [*inputs] if sinks is None else [*inputs, sinks]
    return out, list(torch.autograd.grad(out, wanted, d_out))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_client_against_autograd(client: attnd.Client, options: dict[str, Any]) -> None:
    inputs = tensors(q_heads=6, kv_heads=2, queries=50, keys=70)
    d_out = torch.randn(6, 50, 40).double()
    _, expected = expected_gradients(inputs, d_out, options)
    q, k, v, rows = (x.detach().transpose(0, 1).numpy() for x in (*inputs, d_out))
    mask = options.get("mask")
    result = client.attend_backward(q, k, v, rows, **(options | {"mask": None if mask is None else mask.numpy()}))
    for actual, wanted in zip((result.d_q, result.d_k, result.d_v), expected, strict=False):
        assert actual.dtype == np.float32
        assert relative_error(actual.transpose(1, 0, 2), wanted) <= ERROR
    if "sinks" in options:
        assert result.d_sinks is not None
        assert relative_error(result.d_sinks, expected[3]) <= ERROR
    else:
        assert result.d_sinks is None


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_torch_function_against_autograd(client: attnd.Client, options: dict[str, Any]) -> None:
    inputs = tensors(2, 3, q_heads=6, kv_heads=2, queries=50, keys=70)
    d_out = torch.randn(2, 3, 6, 50, 40).double()
    expected_out, expected = expected_gradients(inputs, d_out, options)
    own = [x.detach().float().requires_grad_() for x in inputs]
    sinks = options.get("sinks")
    if sinks is not None:
        sinks = torch.tensor(sinks, requires_grad=True)
    out = attnd.torch.attention(*own, client=client, **(options | {"sinks": sinks}))
    assert out.dtype == torch.float32
    assert relative_error(out.detach(), expected_out.detach()) <= ERROR
    out.backward(d_out.float())
    own_gradients = [x.grad for x in own] + ([] if sinks is None else [sinks.grad])
    for actual, wanted in zip(own_gradients, expected, strict=True):
        assert relative_error(actual, wanted) <= ERROR


def test_torch_sdpa_gives_the_same(client: attnd.Client) -> None:
    query, key, value = tensors(2, q_heads=4, kv_heads=4, queries=33, keys=33)
    out = attnd.torch.attention(query, key, value, client=client, causal=True)
    local = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert out.dtype == torch.float64
    assert relative_error(out.detach(), local.detach()) <= ERROR
    d_out = torch.randn_like(local)
    pairs = zip(
        torch.autograd.grad(out, (query, key, value), d_out),
        torch.autograd.grad(local, (query, key, value), d_out),
        strict=True,
    )
    for actual, wanted in pairs:
        assert relative_error(actual, wanted) <= ERROR


def test_gradcheck(client: attnd.Client) -> None:
    """Steps of 0.03, since the forward pass answers in float32: central differences then err by about
    (1e-7 / 0.03) in rounding and 0.03 ** 2 times a third derivative, together below 2e-3."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, generator=generator, dtype=torch.float64, requires_grad=True)

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        return attnd.torch.attention(
            *inputs[:3], client=client, causal=True, query_offset=2, softcap=2.0, sinks=inputs[3], scale=0.5
        )

    assert torch.autograd.gradcheck(function, (query, key, value, sinks), eps=0.03, atol=2e-3, rtol=2e-3, nondet_tol=0)


def test_masks_may_differ_along_the_batch(client: attnd.Client) -> None:
    inputs = tensors(3, q_heads=2, kv_heads=1, queries=9, keys=9)
    mask = torch.ones(3, 1, 9, 9, dtype=torch.bool)
    for member, padding in enumerate((0, 2, 5)):  # padding on the right
        mask[member, ..., 9 - padding :] = False
    d_out = torch.randn(3, 2, 9, 40).double()
    expected_out, expected = expected_gradients(inputs, d_out, {"mask": mask, "causal": True})
    out = attnd.torch.attention(*inputs, client=client, mask=mask, causal=True)
    assert relative_error(out.detach(), expected_out.detach()) <= ERROR
    for actual, wanted in zip(torch.autograd.grad(out, inputs, d_out), expected, strict=True):
        assert relative_error(actual, wanted) <= ERROR


def test_what_no_message_holds_is_split(server: Server, start_server: Any) -> None:
    """More heads than a call may have, and more bytes than a small server's messages hold, a mask's among them."""
    small = start_server("--max_message_bytes=1MiB")
    for target, batch, heads, tokens, masked in (
        (server.target, 300, (4, 2), 3, False),
        (small.target, 8, (4, 2), 200, False),
        (small.target, 2, (1, 1), 950, True),
    ):
        inputs = tensors(batch, q_heads=heads[0], kv_heads=heads[1], queries=tokens, keys=tokens)
        mask = torch.ones(tokens, tokens, dtype=torch.bool) if masked else None
        with attnd.Client(target) as client:
            out = attnd.torch.attention(*inputs, client=client, causal=True, mask=mask)
            local = attention(*inputs, causal=True)
            assert relative_error(out.detach(), local.detach()) <= ERROR
            d_out = torch.randn_like(local)
            actual = torch.autograd.grad(out, inputs, d_out)
        for one, wanted in zip(actual, torch.autograd.grad(local, inputs, d_out), strict=True):
            assert relative_error(one, wanted) <= ERROR


def test_what_the_server_has_no_memory_for_is_split(start_server: Any) -> None:
    """A folded batch of short sequences: for each head the server takes a whole block, however few its tokens are."""
    small = start_server("--kv_cache_bytes=4MiB")
    inputs = tensors(53, q_heads=2, kv_heads=1, queries=5, keys=5)
    with attnd.Client(small.target) as client:
        with pytest.raises(attnd.TooManyTokens):
            whole = np.zeros((5, 53, 24), np.float32)
            client.attend(whole, whole, whole)
        out = attnd.torch.attention(*inputs, client=client, causal=True)
        local = attention(*inputs, causal=True)
        assert relative_error(out.detach(), local.detach()) <= ERROR
        d_out = torch.randn_like(local)
        actual = torch.autograd.grad(out, inputs, d_out)
        for one, wanted in zip(actual, torch.autograd.grad(local, inputs, d_out), strict=True):
            assert relative_error(one, wanted) <= ERROR
        too_long = torch.zeros(1, 5000, 24)
        with pytest.raises(attnd.TooManyTokens):  # what one head needs cannot be split
            attnd.torch.attention(too_long[:, :1], too_long, too_long, client=client)


def test_a_call_is_no_larger_than_the_clients_own_messages(start_server: Any) -> None:
    """A server may take more than a client sends."""
    large = start_server("--max_message_bytes=256MiB", "--kv_cache_bytes=1GiB")
    query, key, value = (torch.randn(48, tokens, 64) for tokens in (2, 2900, 2900))  # K and V: 68 MiB
    with attnd.Client(large.target) as client:
        out = attnd.torch.attention(query, key, value, client=client)
        local = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        assert relative_error(out, local.double()) <= ERROR


def test_layouts_and_graphs(client: attnd.Client) -> None:
    """Views, tensors that need no gradient, and a loss that uses the output twice."""
    query, key, value = tensors(q_heads=2, kv_heads=2, queries=8, keys=8)
    transposed = query.detach().transpose(-2, -1).contiguous().transpose(-2, -1).requires_grad_()
    out = attnd.torch.attention(transposed, key.detach(), value, client=client)
    (out.sum() + (out * out).sum()).backward()
    local = attention(query, key.detach(), value)
    wanted = torch.autograd.grad(local.sum() + (local * local).sum(), (query, value))
    assert relative_error(transposed.grad, wanted[0]) <= ERROR
    assert relative_error(value.grad, wanted[1]) <= ERROR
    assert key.grad is None


def test_no_second_derivative(client: attnd.Client) -> None:
    inputs = tensors(q_heads=1, kv_heads=1, queries=2, keys=2)
    out = attnd.torch.attention(*inputs, client=client)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d_out": np.zeros((3, 2, 5), np.float32)}, ValueError, r"d_out is \(?\[?3, 2, 5"),
        ({"q": np.zeros((3, 2, 5), np.float32)}, ValueError, "q has head_dim 5 and k has 4"),
        ({"d_out": np.zeros((3, 2, 4), np.int64)}, TypeError, "d_out has dtype int64"),
        ({"d_out": np.full((3, 2, 4), np.inf, np.float32)}, attnd.InvalidArgument, "d_out row 0, head 0, element 0"),
        ({"sinks": [1.0]}, attnd.InvalidArgument, "sinks"),
        ({"mask": np.zeros((3, 3), bool)}, attnd.InvalidArgument, "query row 0"),
    ],
)
def test_what_disagrees_is_named(client: attnd.Client, change: dict[str, Any], error: type, message: str) -> None:
    arguments = {name: np.zeros((3, 2, 4), np.float32) for name in ("q", "k", "v", "d_out")} | change
    with pytest.raises(error, match=message):
        client.attend_backward(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": torch.zeros(2, 3, 5)}, ValueError, "query has head_dim 4 and key has 5"),
        ({"value": torch.zeros(2, 4, 4)}, ValueError, "value has"),
        ({"key": torch.zeros(2, 3, 4).double()}, TypeError, "key has dtype torch.float64"),
        ({"query": torch.zeros(3, 3, 4)}, ValueError, "query has 3 heads, which 2 key heads do not divide"),
        ({"query": torch.zeros(5, 2, 3, 4)}, ValueError, "same batch dimensions"),
        ({"query": torch.zeros(2, 0, 4)}, ValueError, "holds nothing"),
        ({"mask": torch.zeros(3, 3)}, TypeError, "mask has dtype torch.float32"),
        ({"mask": torch.ones(2, 3, 3, dtype=torch.bool)}, ValueError, "mask has shape"),
        ({"sinks": [0.0]}, ValueError, "sinks has 1 values; query has 2 heads"),
        ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, ValueError, "alibi_slopes requires a gradient"),
        ({"query": torch.full((2, 3, 4), torch.nan)}, attnd.InvalidArgument, "q row 0"),
    ],
)
def test_what_disagrees_is_named_in_torch(
    client: attnd.Client, change: dict[str, Any], error: type, message: str
) -> None:
    arguments = {name: torch.zeros(2, 3, 4) for name in ("query", "key", "value")} | change
    with pytest.raises(error, match=message):
        attnd.torch.attention(client=client, **arguments)
