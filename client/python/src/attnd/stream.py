"""Steps that are sent before earlier ones are answered."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from .handle import SessionHandle
from .pipeline import PendingStep, Pipeline, let_go
from .repetition import repeated
from .results import StepResult
from .steps import Segment, session_step, step


class StepStream:
    """Several steps in flight on one stream, answers matched to their requests; made by ``Client.step_stream``.

    Steps of one session and layer run in the order submitted, whatever the thread; a step's own error is the error of
    its result and does not end the stream. What ends it (the connection is lost, the server drains, no answer comes
    within the timeout) is the error of every step that is unanswered then. Nothing is sent twice by itself:

    ::

        with client.step_stream() as stream:
            pending = [stream.submit(session, layer, q, k, v, start_position=n) for layer, (q, k, v) in enumerate(new)]
            outs = [step.result().out for step in pending]

    Leaving the ``with`` block waits for all answers; leaving it by an exception cancels what is in flight. One that is
    forgotten is closed once its steps are answered. Thread-safe. It belongs to the process that made it: in a forked
    child every use is a RuntimeError, as is every use of its steps' results.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        weakref.finalize(self, let_go, pipeline).atexit = False

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pipeline.in_parent:
            return
        if kind is None:
            self.close()
        else:
            self.cancel()

    def submit(
        self,
        session: SessionHandle,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        start_position: int | None = None,
        rewind: bool = False,
        mask: Any = None,
        return_lse: bool = False,
        *,
        empty_rows: str = "reject",
        out_dtype: str | None = None,
    ) -> PendingStep[StepResult]:
        """``Session.step`` without waiting for its answer; waits only while max_in_flight steps are unanswered.

        Raises:
            TypeError, ValueError: as ``Session.step``; nothing was sent.
            ResourceExhausted: MESSAGE_TOO_LARGE; nothing was sent.
            RuntimeError: the stream is closed.
            AttndError: what ended the stream.
        """
        operation = session_step(
            session,
            layer,
            q,
            k,
            v,
            start_position=start_position,
            rewind=rewind,
            mask=mask,
            return_lse=return_lse,
            empty_rows=empty_rows,
            out_dtype=out_dtype,
        )
        return self._pipeline.send(operation)

    def submit_segments(
        self,
        layer: int,
        segments: Sequence[Segment],
        q: Any,
        k: Any,
        v: Any,
        *,
        empty_rows: str = "reject",
        return_lse: bool = False,
        out_dtype: str | None = None,
    ) -> PendingStep[list[StepResult]]:
        """``Client.step`` likewise: one layer of many sessions. Raises as ``submit``."""
        return self._pipeline.send(
            step(layer, segments, q, k, v, empty_rows=empty_rows, return_lse=return_lse, out_dtype=out_dtype)
        )

    def repeat(self, steps: Sequence[PendingStep[Any]]) -> list[PendingStep[Any]]:
        """Submits what another stream left ``unanswered`` once more, all of it and in its order.

        The first step of each session and layer cuts the layer to its start_position if the lost ones were done. Where
        this stream breaks as well, the same steps can be repeated on yet another.

        Raises:
            ValueError: a step that was answered, one without start_position, one that appends behind one without K
                and V, or one that starts below where the first of its layer does; nothing was sent.
            TokensFreed (of a result): a layer's window had passed what the first of several steps sees.
        """
        return [self._pipeline.send(operation) for operation in repeated(steps)]

    @property
    def unanswered(self) -> list[PendingStep[Any]]:
        """Steps without an answer, in the order sent: those in flight, or those that the stream's end has left."""
        return self._pipeline.unanswered

    def close(self) -> None:
        """Takes no more steps and waits for the answers of those in flight.

        Raises:
            AttndError: the first error of a step whose result nobody asked for.
        """
        self._pipeline.close()
        self._pipeline.join()
        self._pipeline.raise_unasked()

    def cancel(self) -> None:
        """Ends the stream at once; what is unanswered, done or not, fails with ``Cancelled``."""
        self._pipeline.cancel()
        self._pipeline.join()
