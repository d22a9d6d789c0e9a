"""Arrays to the bytes of the wire and back: little endian, row-major, float32, bfloat16 or float16."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .v1 import attnd_pb2 as pb

Array = npt.NDArray[Any]

DTYPES = {"f32": pb.DTYPE_F32, "bf16": pb.DTYPE_BF16, "f16": pb.DTYPE_F16}
KV_DTYPES = {"f32": pb.KV_DTYPE_F32, "bf16": pb.KV_DTYPE_BF16, "f16": pb.KV_DTYPE_F16, "int8": pb.KV_DTYPE_INT8}
EMPTY_ROWS = {"reject": pb.EMPTY_ROWS_REJECT, "zero": pb.EMPTY_ROWS_ZERO}


class WireTensor(NamedTuple):
    """A tensor as it is sent: ``data`` holds ``shape``'s elements, row-major."""

    dtype: int
    data: bytes
    shape: tuple[int, ...]

    def message(self) -> pb.Tensor:
        return pb.Tensor(dtype=self.dtype, data=self.data)  # type: ignore[arg-type]


def encode(name: str, value: Any) -> WireTensor:
    """Any layout and byte order; float32, float16 and bfloat16 as they are, float64 rounded to float32.

    Contiguous little-endian numbers are copied once, into the message.

    Raises:
        TypeError: naming the dtype, for everything else (integers are not converted: they are rarely meant); for
            masked arrays, whose mask would be lost; and as ``as_array``.
        ValueError: a float64 beyond float32's range.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; its mask would be lost. Fill it, and pass mask= where one is taken")
    array = as_array(name, value)
    if array.dtype.name == "bfloat16":
        # ml_dtypes' type has no byte order of its own; its bits have this machine's.
        bits = np.ascontiguousarray(array).view(np.uint16).astype("<u2", copy=False)
        return WireTensor(pb.DTYPE_BF16, bits.tobytes(), array.shape)
    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
        raise TypeError(f"{name} has dtype {array.dtype}; float32, float16, bfloat16 (ml_dtypes) or float64 is needed")
    target, code = ("<f2", pb.DTYPE_F16) if array.dtype.itemsize == 2 else ("<f4", pb.DTYPE_F32)
    try:
        with np.errstate(over="raise"):
            wire = array.astype(target, order="C", copy=False)
    except FloatingPointError:
        raise ValueError(f"{name} has a value beyond float32's range") from None
    return WireTensor(code, wire.tobytes(), array.shape)


def as_array(name: str, value: Any) -> Array:
    """A numpy array of whatever may stand for one; a torch tensor's memory is shared.

    Raises:
        TypeError: a torch tensor that is not on the CPU or not strided: moving it is the caller's to decide; or one
            whose gradient is being recorded, because what comes back would not carry it.
    """
    torch: Any = sys.modules.get("torch")  # whoever has a tensor has imported it
    if not isinstance(value, getattr(torch, "Tensor", ())):
        return np.asarray(value)
    tensor: Any = value
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is on {tensor.device}; pass {name}.cpu()")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; pass {name}.to_dense()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} requires a gradient, which would be lost; pass {name}.detach(), or call under torch.no_grad()"
        )
    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        bits: Array = tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return bits
    try:
        array: Array = tensor.detach().numpy()
    except TypeError:
        raise TypeError(f"{name} has dtype {tensor.dtype}, which numpy has not") from None
    return array


def decode(tensor: pb.Tensor, shape: tuple[int, ...]) -> Array:
    """The array of a tensor of the wire, in its dtype: writable, C order."""
    if tensor.dtype == pb.DTYPE_BF16:
        bits = np.frombuffer(tensor.data, "<u2").astype(np.uint16)
        halves: Array = bits.view(ml_dtypes.bfloat16).reshape(shape)
        return halves
    source = "<f2" if tensor.dtype == pb.DTYPE_F16 else "<f4"
    return np.frombuffer(tensor.data, source).reshape(shape).astype(source[1:])


def encode_mask(name: str, value: Any, shape: tuple[int, int]) -> pb.BitMask:
    """A boolean array [rows, columns], True where attention is allowed, as bits.

    Raises:
        TypeError: not boolean: 0 and 1 could mean an additive mask, where 0 allows.
        ValueError: another shape.
    """
    mask = as_array(name, value)
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} has dtype {mask.dtype}; bool is needed, True where attention is allowed")
    if mask.shape != shape:
        raise ValueError(f"{name} has shape {list(mask.shape)}; {list(shape)} is needed")
    bits = np.packbits(mask.ravel(), bitorder="little").tobytes()
    return pb.BitMask(rows=shape[0], columns=shape[1], bits=bits)


def choice(name: str, value: str, table: dict[str, Any]) -> Any:
    """``table[value]``, or a ValueError that names the choices."""
    if value not in table:
        raise ValueError(f"{name} is {value!r}; one of {', '.join(map(repr, table))} is needed")
    return table[value]
