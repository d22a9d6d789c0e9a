"""Arrays of any layout and byte order become the same bytes, or are refused by name (scenario P01)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attnd.tensors import as_array, decode, encode, encode_mask
from attnd.v1 import attnd_pb2 as pb

VALUES = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
BASE = np.array(VALUES, dtype=np.float32)
F32_BYTES = np.arange(1, 7, dtype="<f4").tobytes()

LAYOUTS = {
    "C": BASE,
    "Fortran": np.asfortranarray(BASE),
    "transposed transpose": np.ascontiguousarray(BASE.T).T,
    "reversed twice": BASE[:, ::-1].copy()[:, ::-1],
    "every second column": np.repeat(BASE, 2, axis=1)[:, ::2],
    "offset into a larger array": np.pad(BASE, 1)[1:-1, 1:-1],
    "read-only": np.frombuffer(BASE.tobytes(), np.float32).reshape(2, 3),
    "broadcast": np.broadcast_to(BASE[None], (1, 2, 3))[0],
    "big endian": BASE.astype(">f4"),
    "float64": BASE.astype(np.float64),
    "big endian float64": BASE.astype(">f8"),
    "list": VALUES,
    "tuple of arrays": tuple(BASE),
    "unaligned": np.frombuffer(b"x" + BASE.tobytes(), np.uint8)[1:].view(np.float32).reshape(2, 3),
    "torch": torch.tensor(VALUES),
    "torch transposed": torch.tensor(BASE.T.copy()).T,
    "torch sliced": torch.tensor(np.pad(BASE, 1))[1:-1, 1:-1],
    "torch expanded": torch.tensor(BASE).expand(1, 2, 3)[0],
    "torch float64": torch.tensor(VALUES, dtype=torch.float64),
    "torch parameter, detached": torch.nn.Parameter(torch.tensor(VALUES)).detach(),
    "list of torch rows": list(torch.tensor(VALUES)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_floats(layout: str) -> None:
    tensor = encode("k", LAYOUTS[layout])
    assert (tensor.dtype, tensor.shape, tensor.data) == (pb.DTYPE_F32, (2, 3), F32_BYTES)


@pytest.mark.parametrize(
    "array",
    [
        BASE.astype(np.float16),
        BASE.astype(">f2"),
        np.asfortranarray(BASE, np.float16),
        torch.tensor(VALUES, dtype=torch.float16),
        torch.tensor(BASE.T.copy(), dtype=torch.float16).T,
    ],
)
def test_float16_is_sent_as_it_is(array: Any) -> None:
    tensor = encode("k", array)
    assert (tensor.dtype, tensor.data) == (pb.DTYPE_F16, BASE.astype("<f2").tobytes())


@pytest.mark.parametrize(
    "array",
    [
        BASE.astype(ml_dtypes.bfloat16),
        np.asfortranarray(BASE).astype(ml_dtypes.bfloat16),
        torch.tensor(VALUES, dtype=torch.bfloat16),
        torch.tensor(BASE.T.copy(), dtype=torch.bfloat16).T,
        torch.tensor(np.pad(BASE, 1), dtype=torch.bfloat16)[1:-1, 1:-1],
    ],
)
def test_bfloat16_is_sent_as_it_is(array: Any) -> None:
    tensor = encode("k", array)
    assert (tensor.dtype, tensor.data) == (
        pb.DTYPE_BF16,
        np.array([0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0], "<u2").tobytes(),
    )


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (BASE.astype(np.int64), "int64"),
        ([[1, 2, 3], [4, 5, 6]], "int64"),
        (BASE.astype(np.uint8), "uint8"),
        (BASE > 2, "bool"),
        (BASE.astype(np.complex64), "complex64"),
        (BASE.astype(np.longdouble), str(np.dtype(np.longdouble))),
        (BASE.astype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (BASE.astype(object), "object"),
        (BASE.astype(str), "<U"),
        (np.ma.masked_less(BASE, 2), "masked"),
        (torch.tensor([1, 2, 3]), "int64"),
        (torch.tensor(VALUES).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (torch.tensor(VALUES, device="meta"), r"meta; pass k\.cpu"),
        (torch.tensor(VALUES).to_sparse(), r"sparse_coo; pass k\.to_dense"),
        (torch.tensor(VALUES, requires_grad=True), r"gradient, which would be lost; pass k\.detach"),
    ],
)
def test_other_dtypes_are_refused_by_name(value: object, named: str) -> None:
    with pytest.raises(TypeError, match=f"^k .*{named}"):
        encode("k", value)


def test_torch_memory_is_shared_and_a_gradient_is_only_refused_where_it_would_be_lost() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.tensor(VALUES, dtype=dtype)
        as_array("k", tensor)[1, 2] = 9
        assert tensor[1, 2] == 9
    with torch.no_grad():
        assert encode("k", torch.tensor(VALUES, requires_grad=True)).data == F32_BYTES
    with torch.inference_mode():
        assert encode("k", torch.tensor(VALUES)).data == F32_BYTES
    assert encode_mask("mask", torch.tensor([[True, False]]), (1, 2)).bits == b"\1"
    answer = decode(encode("out", torch.tensor(VALUES, dtype=torch.bfloat16)).message(), (2, 3))
    assert torch.from_numpy(answer.view(np.int16)).view(torch.bfloat16).tolist() == VALUES


def test_torch_is_not_imported_for_arrays() -> None:
    program = """
import sys, numpy as np, attnd, attnd.aio, attnd.tensors
attnd.tensors.encode("q", np.ones(3, np.float32))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_a_float64_beyond_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="v has a value beyond float32's range"):
        encode("v", np.array([[1e300]]))
    assert np.isinf(np.frombuffer(encode("v", np.array([[np.inf]])).data, "<f4")).all()  # the server names it


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_answers_are_writable_arrays_of_their_dtype(dtype: type) -> None:
    tensor = encode("out", BASE.astype(dtype))
    array = decode(tensor.message(), (3, 2))
    assert array.dtype == dtype
    np.testing.assert_array_equal(array.astype(np.float32), BASE.reshape(3, 2))
    array[0, 0] = 7


def test_mask_bits_are_row_major_and_least_significant_first() -> None:
    mask = np.array([[True, False, False], [True, True, False], [True, True, True]])
    for layout in (mask, np.asfortranarray(mask), mask.tolist()):
        message = encode_mask("mask", layout, (3, 3))
        assert (message.rows, message.columns, message.bits) == (3, 3, bytes([0b11011001, 0b1]))
    with pytest.raises(TypeError, match="mask has dtype int64; bool"):
        encode_mask("mask", mask.astype(np.int64), (3, 3))
    with pytest.raises(ValueError, match=r"mask has shape \[3, 3\]; \[3, 4\] is needed"):
        encode_mask("mask", mask, (3, 4))
