"""The RPC of a stream of steps, which both clients' streams use: what is unanswered, and how it ends."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future
from typing import Any, Protocol

import grpc

from .channel import Channel
from .endpoint import MESSAGE_BYTES
from .errors import AttndError, Cancelled, Unavailable, error_of_segment, make_error
from .operation import Operation, Result
from .stall import StallWatch
from .v1 import attnd_pb2 as pb


class PendingStep(Future[Result]):
    """A step that was submitted. It is on its way and cannot be cancelled by itself.

    ``result()`` waits for the answer and raises as ``Session.step``, in a forked child RuntimeError;
    ``add_done_callback`` calls on the stream's reading thread, which must not wait for the stream.

    Attributes:
        request_id: counts the stream's steps from 1.
        repeatable: every segment has its start_position: where its stream breaks, ``StepStream.repeat`` takes the step.
        operation: what was sent, until it is answered.
    """

    def __init__(self, operation: Operation[Result]) -> None:
        super().__init__()
        self.operation: Operation[Result] | None = operation
        self.request_id = 0
        self.repeatable = operation.idempotent
        self.asked = False
        self._pid = os.getpid()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Result:
        check_process(self._pid)
        self.asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        check_process(self._pid)
        self.asked = True
        return super().exception(timeout)


class Pipeline:
    """Thread-safe, with a thread that reads and one that watches the time. It belongs to the process that made it.

    Args:
        max_in_flight: steps that are sent and not answered.
        timeout: seconds without any answer, while steps are in flight, after which it ends.
    """

    def __init__(self, channel: Channel, max_in_flight: int, timeout: float) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; a step at least is needed")
        self._max_in_flight = max_in_flight
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._next_id = 1
        self._unanswered: dict[int, PendingStep[Any]] = {}  # in the order sent; after the end, what it left
        self._failures = Failures()
        self._closing = False
        self._cancelled = False
        self._ended: AttndError | None = None
        self._outgoing: queue.SimpleQueue[pb.StepRequest | None] = queue.SimpleQueue()
        self._watch = StallWatch(timeout, "the server answered no step")
        requests = iter(self._outgoing.get, None)
        self._call = channel.stub().StepStream(requests, metadata=channel.endpoint.metadata)
        self._reader = threading.Thread(target=self._read, name="attnd.StepStream", daemon=True)
        self._reader.start()

    @property
    def in_parent(self) -> bool:
        """Whether it is the parent's of this process."""
        return self._pid != os.getpid()

    @property
    def unanswered(self) -> list[PendingStep[Any]]:
        check_process(self._pid)
        with self._changed:
            return list(self._unanswered.values())

    def send(self, operation: Operation[Result], asked: bool = False) -> PendingStep[Result]:
        """Waits while max_in_flight steps are unanswered.

        Args:
            asked: the caller sees to it that the step's error is raised.

        Raises:
            ResourceExhausted: MESSAGE_TOO_LARGE; nothing was sent.
            RuntimeError: it is closed, or the parent's of this process.
            AttndError: what ended it.
        """
        check_process(self._pid)
        _check_size(operation.request)
        step = PendingStep(operation)
        step.asked = asked
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._ended or len(self._unanswered) < self._max_in_flight)
            if self._closing:
                raise RuntimeError("a step was submitted to a StepStream that is closed")
            if self._ended is not None:
                error = self._ended
                raise make_error(error.code, error.message, error.reason, error.metadata, error.retry_delay)
            if not self._unanswered:
                self._watch.wait_begins()
            operation.request.request_id = step.request_id = self._next_id
            self._next_id += 1
            self._unanswered[step.request_id] = step
            self._outgoing.put(operation.request)
        return step

    def close(self) -> None:
        """Takes no more steps; ends once those in flight are answered."""
        check_process(self._pid)
        with self._changed:
            if not self._closing:
                self._closing = True
                self._watch.wait_begins()
                self._outgoing.put(None)
                self._changed.notify_all()

    def cancel(self) -> None:
        """Ends, and fails what is unanswered."""
        self._cancelled = True
        self.close()
        self._call.cancel()

    def join(self) -> None:
        """Waits for the end; then every step has its result or its error."""
        self._reader.join()

    def raise_unasked(self) -> None:
        """Raises the first error of a step whose result nobody asked for."""
        self._failures.raise_unasked()

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
            self._ended = error or Unavailable("the stream has ended", code=grpc.StatusCode.UNAVAILABLE)
            lost = list(self._unanswered.values())
            self._outgoing.put(None)  # gRPC's sending thread waits for it
            self._changed.notify_all()
        for step in lost:
            self._fail(step, _unanswered(self._ended, step))

    def _answer(self, response: pb.StepResponse) -> None:
        with self._changed:
            step = self._unanswered.pop(response.request_id, None)
            if step is None:
                raise AttndError(f"the server answered step {response.request_id}, which is not in flight")
            if self._unanswered or self._closing:
                self._watch.wait_begins()
            else:
                self._watch.wait_ends()
            self._changed.notify_all()
        operation, step.operation = step.operation, None  # its tensors may be large, and its future live long
        try:
            if response.status.code:
                raise error_of_segment(response.status)
            assert operation is not None
            result = operation.result(response)
        except Exception as error:
            self._fail(step, error)
        else:
            step.set_result(result)

    def _fail(self, step: PendingStep[Any], error: Exception) -> None:
        self._failures.add(step)
        step.set_exception(error)


class Failed(Protocol):
    """A step of either client's streams that has an error, or is about to."""

    asked: bool

    def exception(self) -> BaseException | None: ...


class Failures:
    """A stream's failed steps whose errors nobody has asked for: they would be lost."""

    def __init__(self) -> None:
        self._steps: list[Failed] = []

    def add(self, step: Failed) -> None:
        self._steps = [failed for failed in (*self._steps, step) if not failed.asked]

    def raise_unasked(self) -> None:
        """Raises the first of them."""
        for step in self._steps:
            error = None if step.asked else step.exception()
            if error is not None:
                raise error


def check_process(pid: int) -> None:
    """Raises RuntimeError in any process but that one: a child has neither the threads nor the connection."""
    if pid != os.getpid():
        raise RuntimeError("this StepStream belongs to the process that this one was forked from; make another")


def let_go(pipeline: Pipeline) -> None:
    """When nobody holds its stream any more: its threads hold the pipeline itself."""
    if not pipeline.in_parent:
        pipeline.close()


def _unanswered(error: AttndError, step: PendingStep[Any]) -> AttndError:
    """``error`` for one step, saying what may be done with it."""
    if step.repeatable:
        hint = "it has its start_position: another stream can repeat it"
    else:
        hint = "it has no start_position, so that whether it was done only its session's length tells"
    message = f"step {step.request_id} has no answer: {error.message}; {hint}"
    return make_error(error.code, message, error.reason, error.metadata, error.retry_delay)


def _check_size(request: pb.StepRequest) -> None:
    """Raises ResourceExhausted: a message above the limit would end the whole stream."""
    size = request.ByteSize()
    if size > MESSAGE_BYTES:
        message = f"the step is {size} bytes and a message has {MESSAGE_BYTES} at most: send fewer tokens at once"
        raise make_error(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "MESSAGE_TOO_LARGE")
