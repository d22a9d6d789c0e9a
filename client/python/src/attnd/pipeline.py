"""The bookkeeping of a stream of steps, whichever client it belongs to: what is unanswered, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc

from .endpoint import MESSAGE_BYTES
from .errors import AttndError, Unavailable, error_of_segment, make_error
from .operation import Operation
from .v1 import attnd_pb2 as pb


class Step(Protocol):
    """A step that was submitted: a future of one library or the other."""

    operation: Operation[Any]
    request_id: int
    asked: bool

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Any, /) -> None: ...
    def exception(self) -> BaseException | None: ...


AnyStep = TypeVar("AnyStep", bound=Step)


class Pipeline(Generic[AnyStep]):
    """Not thread-safe, but for ``settle`` and ``fail``.

    Attributes:
        unanswered: in the order sent; after the stream's end, what it left.
        ended: why no more steps are taken; None while they are.
    """

    def __init__(self, max_in_flight: int) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; a step at least is needed")
        self.max_in_flight = max_in_flight
        self.unanswered: dict[int, AnyStep] = {}
        self.ended: AttndError | None = None
        self._next_id = 1
        self._failed: list[AnyStep] = []

    @property
    def has_room(self) -> bool:
        return len(self.unanswered) < self.max_in_flight

    def add(self, step: AnyStep) -> pb.StepRequest:
        """Returns what is to be sent."""
        request: pb.StepRequest = step.operation.request
        request.request_id = step.request_id = self._next_id
        self._next_id += 1
        self.unanswered[step.request_id] = step
        return request

    def take(self, response: pb.StepResponse) -> AnyStep:
        step = self.unanswered.pop(response.request_id, None)
        if step is None:
            raise AttndError(f"the server answered step {response.request_id}, which is not in flight")
        return step

    def end(self, error: AttndError | None) -> list[AnyStep]:
        """Returns the steps that will have no answer, for ``fail``."""
        if self.ended is not None:
            return []
        self.ended = error or Unavailable("the stream has ended", code=grpc.StatusCode.UNAVAILABLE)
        return list(self.unanswered.values())

    def settle(self, step: AnyStep, response: pb.StepResponse) -> None:
        if step.done():  # nobody waits for it any more
            return
        try:
            if response.status.code:
                raise error_of_segment(response.status)
            result = step.operation.result(response)
        except Exception as error:
            self._failed = [failed for failed in self._failed if not failed.asked] + [step]
            step.set_exception(error)
        else:
            step.set_result(result)

    def fail(self, steps: Sequence[AnyStep]) -> None:
        assert self.ended is not None
        for step in steps:
            if not step.done():
                self._failed.append(step)
                step.set_exception(_unanswered(self.ended, step))

    def raise_unasked(self) -> None:
        """Raises the first error of a step whose result nobody asked for: it would be lost."""
        for step in self._failed:
            error = None if step.asked else step.exception()
            if error is not None:
                raise error


def _unanswered(error: AttndError, step: Step) -> AttndError:
    """``error`` for one step, saying what may be done with it."""
    if step.operation.idempotent:
        hint = "it has its start_position: another stream can repeat it"
    else:
        hint = "it has no start_position, so that whether it was done only its session's length tells"
    message = f"step {step.request_id} has no answer: {error.message}; {hint}"
    return make_error(error.code, message, error.reason, error.metadata, error.retry_delay)


def check_size(request: pb.StepRequest) -> None:
    """Raises ResourceExhausted: a message above the limit would end the whole stream."""
    size = request.ByteSize()
    if size > MESSAGE_BYTES:
        message = f"the step is {size} bytes and a message has {MESSAGE_BYTES} at most: send fewer tokens at once"
        raise make_error(grpc.StatusCode.RESOURCE_EXHAUSTED, message, "MESSAGE_TOO_LARGE")


def repeated(steps: Sequence[Step]) -> list[Operation[Any]]:
    """The same steps once more, in the same order, after a stream that left them unanswered.

    Any number of them may have been done, so that a layer can be longer than the first of its steps expects: that one
    cuts it. What it cuts are tokens that the steps behind it bring again.

    Raises:
        ValueError: a step without start_position; a step without K and V before one that appends to the same layer:
            where not everything is causal it would now see those tokens.
    """
    unsafe = [step.request_id for step in steps if not step.operation.idempotent]
    if unsafe:
        raise ValueError(f"steps {unsafe} have no start_position: whether they were done is not known")
    operations = []
    appended: set[tuple[int, str]] = set()
    attended: set[tuple[int, str]] = set()
    for step in steps:
        request = pb.StepRequest()
        request.CopyFrom(step.operation.request)
        for segment in request.segments:
            place = (request.layer, segment.session_id)
            if not request.HasField("k"):
                attended.add(place)
                continue
            if place in attended:
                raise ValueError(
                    f"step {step.request_id} appends to layer {request.layer} of a session behind a step without k and "
                    "v: whether it was done is not known, and that step may see its tokens"
                )
            if place not in appended:
                segment.rewind = True
                appended.add(place)
        operations.append(Operation(step.operation.method, request, step.operation.result, idempotent=True))
    return operations
