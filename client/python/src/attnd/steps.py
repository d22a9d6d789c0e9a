"""Building a step's request and reading its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import AttndError, error_of_segment
from .handle import SessionHandle, session_id_of
from .operation import Operation, Result
from .results import StepResult
from .tensors import DTYPES, EMPTY_ROWS, WireTensor, choice, decode, encode, encode_mask
from .v1 import attnd_pb2 as pb


@dataclass(frozen=True)
class Segment:
    """One session's part of a step.

    Attributes:
        session_id: of the session, or a ``Session``.
        num_tokens: >= 1.
        start_position: of the first token. None: append. The layer's length: append. Such that the part ends exactly at
            the layer's length: a replay, so a lost answer can be asked for again. Lower: only with ``rewind``.
        rewind: cut the layer to start_position first.
        mask: bool [num_tokens, num_tokens], allowed pairs among the new tokens; tokens before them are not affected.
    """

    session_id: Any
    num_tokens: int
    start_position: int | None = None
    rewind: bool = False
    mask: Any = None

    def message(self) -> pb.Segment:
        mask = None
        if self.mask is not None:
            mask = encode_mask("mask", self.mask, (self.num_tokens, self.num_tokens))
        return pb.Segment(
            session_id=session_id_of(self.session_id),
            num_tokens=self.num_tokens,
            start_position=self.start_position,
            rewind=self.rewind,
            mask=mask,
        )


@dataclass(frozen=True)
class StepTensors:
    """Q, K and V of all segments; None where the step has none."""

    q: WireTensor | None
    k: WireTensor | None
    v: WireTensor | None

    @staticmethod
    def encode(q: Any, k: Any, v: Any) -> StepTensors:
        """Raises ValueError when the tensors do not make a step, or disagree with each other."""
        if (k is None) != (v is None):
            raise ValueError("k and v come together: both, or neither (attend only)")
        if q is None and k is None:
            raise ValueError("a step has q (attend only), k and v (append only), or all three")
        tensors = {name: encode(name, value) for name, value in (("q", q), ("k", k), ("v", v)) if value is not None}
        for name, tensor in tensors.items():
            if len(tensor.shape) != 3:
                raise ValueError(f"{name} has shape {list(tensor.shape)}; [tokens, heads, dim] is needed")
        counts = {name: tensor.shape[0] for name, tensor in tensors.items()}
        if len(set(counts.values())) > 1:
            raise ValueError("; ".join(f"{name} has {count} tokens" for name, count in counts.items()))
        result = StepTensors(tensors.get("q"), tensors.get("k"), tensors.get("v"))
        result._check_agreement()
        return result

    @property
    def num_tokens(self) -> int:
        tensor = self.q or self.k
        return tensor.shape[0] if tensor else 0

    @property
    def num_q_heads(self) -> int | None:
        return None if self.q is None else self.q.shape[1]

    def _check_agreement(self) -> None:
        if self.k is not None and self.v is not None and self.k.shape[1] != self.v.shape[1]:
            raise ValueError(f"k has {self.k.shape[1]} heads and v has {self.v.shape[1]}")
        if self.q is not None and self.k is not None and self.q.shape[2] != self.k.shape[2]:
            raise ValueError(f"q has head_dim {self.q.shape[2]} and k has {self.k.shape[2]}")


def step_request(
    layer: int,
    segments: Sequence[Segment],
    tensors: StepTensors,
    *,
    empty_rows: str = "reject",
    return_lse: bool = False,
    out_dtype: str | None = None,
) -> pb.StepRequest:
    return pb.StepRequest(
        layer=layer,
        segments=[segment.message() for segment in segments],
        q=tensors.q.message() if tensors.q else None,
        k=tensors.k.message() if tensors.k else None,
        v=tensors.v.message() if tensors.v else None,
        empty_rows=choice("empty_rows", empty_rows, EMPTY_ROWS),
        return_lse=return_lse,
        out_dtype=choice("out_dtype", out_dtype, DTYPES) if out_dtype is not None else pb.DTYPE_UNSPECIFIED,
    )


def step(
    layer: int,
    segments: Sequence[Segment],
    q: Any,
    k: Any,
    v: Any,
    *,
    empty_rows: str,
    return_lse: bool,
    out_dtype: str | None,
) -> Operation[list[StepResult]]:
    """A step of several sessions. Raises TypeError or ValueError for what cannot be sent."""
    if not segments:
        raise ValueError("a step has at least one segment")
    tensors = StepTensors.encode(q, k, v)
    tokens = sum(segment.num_tokens for segment in segments)
    if tensors.num_tokens != tokens:
        raise ValueError(f"the segments have {tokens} tokens and the tensors {tensors.num_tokens}")
    for segment in segments:
        if isinstance(segment.session_id, SessionHandle):
            segment.session_id.check_shapes(tensors.q, tensors.k, tensors.v)
    request = step_request(layer, segments, tensors, empty_rows=empty_rows, return_lse=return_lse, out_dtype=out_dtype)
    heads = tensors.num_q_heads
    return step_operation(request, lambda answer: step_results(request, answer, heads))


def session_step(
    session: SessionHandle,
    layer: int,
    q: Any,
    k: Any,
    v: Any,
    *,
    start_position: int | None,
    rewind: bool,
    mask: Any,
    return_lse: bool,
    empty_rows: str,
    out_dtype: str | None,
) -> Operation[StepResult]:
    """A step of one session, whose tokens are counted by the tensors."""
    tensors = StepTensors.encode(q, k, v)
    session.check_shapes(tensors.q, tensors.k, tensors.v)
    segment = Segment(session, tensors.num_tokens, start_position, rewind, mask)
    request = step_request(layer, [segment], tensors, empty_rows=empty_rows, return_lse=return_lse, out_dtype=out_dtype)
    heads = tensors.num_q_heads
    return step_operation(request, lambda answer: step_results(request, answer, heads)[0])


def step_operation(request: pb.StepRequest, result: Callable[[pb.StepResponse], Result]) -> Operation[Result]:
    """Idempotent where every segment says its position: the server sees from it that the step was done already."""
    replayable = all(segment.HasField("start_position") for segment in request.segments)
    return Operation("Step", request, result, idempotent=replayable)


def segment_error(result: pb.SegmentResult) -> AttndError | None:
    return error_of_segment(result.status) if result.HasField("status") and result.status.code else None


def step_results(request: pb.StepRequest, answer: pb.StepResponse, num_q_heads: int | None) -> list[StepResult]:
    """One result per segment, in the request's order. num_q_heads: None: the step had no Q."""
    tokens = sum(segment.num_tokens for segment in request.segments)
    out = lse = None
    if num_q_heads is not None:
        out = _rows(answer.out, tokens, num_q_heads)
        if request.return_lse:
            lse = _rows(answer.lse, tokens, num_q_heads)[..., 0]
    results = []
    start = 0
    for segment, result in zip(request.segments, answer.segments, strict=True):
        part = slice(start, start + segment.num_tokens)
        start += segment.num_tokens
        results.append(
            StepResult(
                start_position=result.start_position,
                length=result.length,
                queue_seconds=answer.timing.queue_ns * 1e-9,
                compute_seconds=answer.timing.compute_ns * 1e-9,
                error=segment_error(result),
                _out=None if out is None else out[part],
                _lse=None if lse is None else lse[part],
            )
        )
    return results


def _rows(tensor: pb.Tensor, tokens: int, heads: int) -> np.ndarray[Any, Any]:
    """[tokens, heads, dim], the dim being what the number of bytes leaves."""
    return decode(tensor, (tokens, heads, -1))
