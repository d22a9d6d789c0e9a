"""What a stream that broke has left unanswered, once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .operation import Operation
from .v1 import attnd_pb2 as pb


class Pending(Protocol):
    """A step that was submitted to a stream of either client."""

    operation: Operation[Any] | None
    request_id: int
    repeatable: bool


def repeated(steps: Sequence[Pending]) -> list[Operation[Any]]:
    """The same steps in the same order.

    Any number of them may have been done, so that a layer can be longer than the first of its steps expects: that one
    cuts it. What it cuts are tokens that the steps behind it bring again.

    Raises:
        ValueError: a step that was answered; one without start_position; one without K and V before one that appends
            to the same layer: where not everything is causal it would now see those tokens; one that starts below
            where the first of its layer does, which may have other tokens before it by now.
    """
    unsafe = [step.request_id for step in steps if not step.repeatable]
    if unsafe:
        raise ValueError(f"steps {unsafe} have no start_position: whether they were done is not known")
    operations = []
    appended: dict[tuple[int, str], int] = {}  # where the first such step of a layer starts
    attended: set[tuple[int, str]] = set()
    for step in steps:
        operation = step.operation
        if operation is None:
            raise ValueError(f"step {step.request_id} was answered")
        request = pb.StepRequest()
        request.CopyFrom(operation.request)
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
                appended[place] = segment.start_position
            elif segment.start_position < appended[place]:
                raise ValueError(
                    f"step {step.request_id} starts at {segment.start_position} of layer {request.layer} of a session, "
                    f"below {appended[place]}, where an earlier step does: whether it was done is not known, and the "
                    "earlier one would follow its tokens"
                )
        operations.append(Operation(operation.method, request, operation.result, idempotent=True))
    return operations
