"""Steps that are sent before earlier ones are answered."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from .channel import Channel
from .errors import AttndError, Cancelled
from .handle import SessionHandle
from .operation import Operation, Result
from .pipeline import Pipeline, check_size, repeated
from .results import StepResult
from .stall import StallWatch
from .steps import Segment, session_step, step
from .v1 import attnd_pb2 as pb


class PendingStep(Future[Result]):
    """A step that was submitted. It is on its way and cannot be cancelled by itself.

    ``result()`` waits for the answer and raises as ``Session.step``; ``add_done_callback`` calls on the stream's
    reading thread, which must not wait for the stream.

    Attributes:
        request_id: counts the stream's steps from 1.
    """

    def __init__(self, operation: Operation[Result]) -> None:
        super().__init__()
        self.operation = operation
        self.request_id = 0
        self.asked = False
        self.set_running_or_notify_cancel()

    @property
    def repeatable(self) -> bool:
        """Every segment has its start_position: after a stream that broke, ``StepStream.repeat`` takes the step."""
        return self.operation.idempotent

    def result(self, timeout: float | None = None) -> Result:
        self.asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.asked = True
        return super().exception(timeout)


class StepStream:
    """Several steps in flight on one stream, answers matched to their requests; made by ``Client.step_stream``.

    Steps of one session and layer run in the order submitted, whatever the thread; a step's own error is the error of
    its result and does not end the stream. What ends it (the connection is lost, the server drains, no answer comes
    within the timeout) is the error of every step that is unanswered then. Nothing is sent twice by itself:

    ::

        with client.step_stream() as stream:
            pending = [stream.submit(session, layer, q, k, v, start_position=n) for layer, (q, k, v) in enumerate(new)]
            outs = [step.result().out for step in pending]

    Leaving the ``with`` block waits for all answers; leaving it by an exception cancels what is in flight. Thread-safe.
    It belongs to the process that made it, and in a forked child every use is a RuntimeError.
    """

    def __init__(self, channel: Channel, max_in_flight: int, timeout: float) -> None:
        self._pid = os.getpid()
        self._pipeline: Pipeline[PendingStep[Any]] = Pipeline(max_in_flight)
        self._changed = threading.Condition()
        self._closing = False
        self._cancelled = False
        self._outgoing: queue.SimpleQueue[pb.StepRequest | None] = queue.SimpleQueue()
        self._watch = StallWatch(timeout, "the server answered no step")
        requests = iter(self._outgoing.get, None)
        self._call = channel.stub().StepStream(requests, metadata=channel.endpoint.metadata)
        self._reader = threading.Thread(target=self._read, name="attnd.StepStream", daemon=True)
        self._reader.start()

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pid != os.getpid():
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
        return self._send(operation)

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
        return self._send(
            step(layer, segments, q, k, v, empty_rows=empty_rows, return_lse=return_lse, out_dtype=out_dtype)
        )

    def repeat(self, steps: Sequence[PendingStep[Any]]) -> list[PendingStep[Any]]:
        """Submits what another stream left ``unanswered`` once more, all of it and in its order.

        The first step of each session and layer cuts the layer to its start_position if the lost ones were done. Where
        this stream breaks as well, the same steps can be repeated on yet another.

        Raises:
            ValueError: a step without start_position, or one that appends behind one without K and V; nothing was sent.
            TokensFreed (of a result): a layer's window had passed what the first of several steps sees.
        """
        return [self._send(operation) for operation in repeated(steps)]

    @property
    def unanswered(self) -> list[PendingStep[Any]]:
        """Steps without an answer, in the order sent: those in flight, or those that the stream's end has left."""
        with self._changed:
            return list(self._pipeline.unanswered.values())

    def close(self) -> None:
        """Takes no more steps and waits for the answers of those in flight.

        Raises:
            AttndError: the first error of a step whose result nobody asked for.
        """
        self._check_process()
        with self._changed:
            self._stop_sending()
        self._reader.join()
        self._pipeline.raise_unasked()

    def cancel(self) -> None:
        """Ends the stream at once; what is unanswered, done or not, fails with ``Cancelled``."""
        self._check_process()
        with self._changed:
            self._cancelled = True
            self._stop_sending()
        self._call.cancel()
        self._reader.join()

    def _send(self, operation: Operation[Result]) -> PendingStep[Result]:
        self._check_process()
        check_size(operation.request)
        pending = PendingStep(operation)
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._pipeline.ended or self._pipeline.has_room)
            if self._closing:
                raise RuntimeError("a step was submitted to a StepStream that is closed")
            if self._pipeline.ended is not None:
                raise self._pipeline.ended
            if not self._pipeline.unanswered:
                self._watch.wait_begins()
            self._outgoing.put(self._pipeline.add(pending))
        return pending

    def _stop_sending(self) -> None:
        if not self._closing:
            self._closing = True
            self._watch.wait_begins()
            self._outgoing.put(None)
            self._changed.notify_all()

    def _read(self) -> None:
        error: AttndError | None = None
        with self._watch.over(self._call.cancel):
            try:
                for response in self._call:
                    self._answer(response)
            except grpc.RpcError as failure:
                error = self._watch.error(failure)
            except AttndError as unexpected:
                error = unexpected
                self._call.cancel()
        with self._changed:
            if self._cancelled:
                error = Cancelled("the stream was cancelled", code=grpc.StatusCode.CANCELLED)
            lost = self._pipeline.end(error)
            self._outgoing.put(None)  # gRPC's sending thread waits for it
            self._changed.notify_all()
        self._pipeline.fail(lost)

    def _answer(self, response: pb.StepResponse) -> None:
        with self._changed:
            pending = self._pipeline.take(response)
            if self._pipeline.unanswered or self._closing:
                self._watch.wait_begins()
            else:
                self._watch.wait_ends()
            self._changed.notify_all()
        self._pipeline.settle(pending, response)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this StepStream belongs to the process that this one was forked from; make another")
