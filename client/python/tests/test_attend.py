"""The stateless call against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference

import attnd

F32_ERROR = 1e-5
HALF_ERROR = 1e-2
INT8_ERROR = 4e-2  # against the values as given: storing them costs too


def tensors(queries: int, keys: int, q_heads: int, kv_heads: int, dim: int, value_dim: int) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(queries * 1000 + keys)
    q = random.standard_normal((queries, q_heads, dim), dtype=np.float32)
    k = random.standard_normal((keys, kv_heads, dim), dtype=np.float32)
    v = random.standard_normal((keys, kv_heads, value_dim), dtype=np.float32)
    return q, k, v


MASK = np.random.default_rng(1).random((70, 70)) < 0.5
MASK[:, 0] = True  # every query sees a key

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "mask": {"mask": MASK},
    "mask and causal": {"mask": MASK, "causal": True},
    "scale": {"scale": 0.3},
    "scale of zero": {"scale": 0.0},
    "window": {"causal": True, "window": 7},
    "window without causal": {"window": 7},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0, 1.0, -3.0]},
    "alibi": {"causal": True, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0]},
    "all": {
        "causal": True,
        "mask": MASK,
        "scale": 0.2,
        "window": 40,
        "softcap": 3.0,
        "sinks": [0.1] * 6,
        "alibi_slopes": [0.02] * 6,
        "empty_rows": "zero",
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option(client: attnd.Client, options: dict[str, Any]) -> None:
    q, k, v = tensors(70, 70, q_heads=6, kv_heads=2, dim=24, value_dim=40)
    result = client.attend(q, k, v, return_lse=True, return_weights=True, **options)
    out, lse, weights = reference.attend(q, k, v, **{n: o for n, o in options.items() if n != "empty_rows"})
    assert reference.relative_error(result.out, out) <= F32_ERROR
    np.testing.assert_allclose(result.lse, lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.weights, weights, rtol=1e-4, atol=1e-6)


def test_unequal_counts_need_an_offset(client: attnd.Client) -> None:
    q, k, v = tensors(5, 90, q_heads=4, kv_heads=1, dim=16, value_dim=16)
    assert reference.relative_error(client.attend(q, k, v).out, reference.attend(q, k, v)[0]) <= F32_ERROR
    aligned = client.attend(q, k, v, causal=True, query_offset=85).out
    assert reference.relative_error(aligned, reference.attend(q, k, v, causal=True, offset=85)[0]) <= F32_ERROR
    with pytest.raises(attnd.InvalidArgument):
        client.attend(q, k, v, causal=True)


def test_one_head_needs_no_axis_for_it(client: attnd.Client) -> None:
    result = client.attend([[0.0]], [[0.0], [0.0]], [[2.0], [8.0]], scale=1, return_lse=True, return_weights=True)
    assert (result.out.tolist(), result.weights.tolist()) == ([[5.0]], [[[0.5, 0.5]]])
    np.testing.assert_allclose(result.lse, [[np.log(2)]], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "error"), [(np.float16, HALF_ERROR), (ml_dtypes.bfloat16, HALF_ERROR), (np.float64, F32_ERROR)]
)
def test_answers_come_in_q_dtype(client: attnd.Client, dtype: type, error: float) -> None:
    q, k, v = (x.astype(dtype) for x in tensors(9, 33, q_heads=2, kv_heads=1, dim=32, value_dim=32))
    result = client.attend(q, k, v)
    assert result.out.dtype == (np.float32 if dtype is np.float64 else dtype)
    assert reference.relative_error(result.out, reference.attend(q, k, v)[0]) <= error
    assert client.attend(q, k, v, out_dtype="f32").out.dtype == np.float32


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "f16", "int8"])
def test_kv_dtype_is_the_arithmetic(client: attnd.Client, kv_dtype: str) -> None:
    q, k, v = tensors(9, 200, q_heads=4, kv_heads=2, dim=64, value_dim=64)
    error = reference.relative_error(client.attend(q, k, v, kv_dtype=kv_dtype).out, reference.attend(q, k, v)[0])
    assert error <= {"f32": F32_ERROR, "int8": INT8_ERROR}.get(kv_dtype, HALF_ERROR)


def test_layouts_give_the_same_answer(client: attnd.Client) -> None:
    q, k, v = tensors(6, 6, q_heads=2, kv_heads=2, dim=8, value_dim=8)
    expected = client.attend(q, k, v).out
    for other in (np.asfortranarray(k), k[:, :, ::-1].copy()[:, :, ::-1], k.astype(">f4"), k.tolist()):
        np.testing.assert_array_equal(client.attend(q, other, v).out, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((3, 2, 5), np.float32)}, ValueError, "q has head_dim 5 and k has 4"),
        ({"v": np.zeros((4, 2, 4), np.float32)}, ValueError, "k has 3 rows of 2 heads, v has 4 rows of 2"),
        ({"v": np.zeros((3, 4), np.float32)}, ValueError, r"not q \[3, 2, 4\], k \[3, 2, 4\], v \[3, 4\]"),
        ({"k": np.zeros((3, 2, 4), np.int32)}, TypeError, "k has dtype int32"),
        ({"mask": np.ones((3, 2), bool)}, ValueError, r"mask has shape \[3, 2\]; \[3, 3\] is needed"),
        ({"kv_dtype": "int4"}, ValueError, "kv_dtype is 'int4'"),
        ({"window": 0}, attnd.InvalidArgument, "window"),
        ({"softcap": 0.0}, attnd.InvalidArgument, "softcap"),
        ({"sinks": [1.0]}, attnd.InvalidArgument, "sinks"),
    ],
)
def test_what_disagrees_is_named(client: attnd.Client, change: dict[str, Any], error: type, message: str) -> None:
    arguments = {name: np.zeros((3, 2, 4), np.float32) for name in "qkv"} | change
    with pytest.raises(error, match=message):
        client.attend(**arguments)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("NOT_FINITE", {"v": np.full((2, 1), np.inf, np.float32)}),
        ("NOT_FINITE", {"q": np.full((1, 1), np.nan, np.float32)}),
        ("EMPTY_ROW", {"mask": np.zeros((1, 2), bool)}),
        ("BAD_SHAPE", {"causal": True}),
    ],
)
def test_errors_have_reasons(client: attnd.Client, reason: str, change: dict[str, Any]) -> None:
    arguments = {"q": np.zeros((1, 1), np.float32), "k": np.zeros((2, 1), np.float32), "v": np.ones((2, 1), np.float32)}
    with pytest.raises(attnd.InvalidArgument) as caught:
        client.attend(**(arguments | change))
    assert caught.value.reason == reason
    assert isinstance(caught.value, ValueError)


def test_an_empty_row_may_be_zero(client: attnd.Client) -> None:
    zeros = np.zeros((1, 1), np.float32)
    result = client.attend(zeros, zeros, zeros + 9, mask=[[False]], empty_rows="zero", return_lse=True)
    assert (result.out.tolist(), result.lse.tolist()) == ([[0.0]], [[-np.inf]])
