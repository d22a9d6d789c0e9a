"""torch tensors to the bytes of the wire and back, in their own dtype."""

from __future__ import annotations

import torch

from .. import tensors
from ..tensors import WireTensor
from ..v1 import attnd_pb2 as pb

_DTYPES = {pb.DTYPE_F32: torch.float32, pb.DTYPE_BF16: torch.bfloat16, pb.DTYPE_F16: torch.float16}


def encode(name: str, tensor: torch.Tensor) -> WireTensor:
    """Raises TypeError naming the dtype unless it is float32, bfloat16 or float16."""
    if tensor.dtype not in _DTYPES.values():
        raise TypeError(f"{name} has dtype {tensor.dtype}; the server takes float32, bfloat16 and float16")
    return tensors.encode(name, tensor.detach().to("cpu"))


def decode(tensor: pb.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    # A copy, because torch wants memory that may be written.
    return torch.frombuffer(bytearray(tensor.data), dtype=_DTYPES[tensor.dtype]).reshape(shape)
