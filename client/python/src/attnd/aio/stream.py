"""Steps that are sent before earlier ones are answered, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections.abc import Generator, Sequence
from typing import Any

from .. import pipeline
from ..handle import SessionHandle
from ..operation import Operation, Result
from ..pipeline import Failures, Pipeline
from ..repetition import repeated
from ..results import StepResult
from ..steps import Segment, session_step, step


class PendingStep(asyncio.Future[Result]):
    """A step that was submitted; awaiting it waits for the answer and raises as ``Session.step``.

    Cancelling it only ends the wait: the step is on its way.

    Attributes:
        request_id: counts the stream's steps from 1.
        repeatable: every segment has its start_position: where its stream breaks, ``StepStream.repeat`` takes the step.
        operation: what was sent, until it is answered.
    """

    def __init__(self, operation: Operation[Result], request_id: int) -> None:
        super().__init__()
        self.operation: Operation[Result] | None = operation
        self.request_id = request_id
        self.repeatable = operation.idempotent
        self.asked = False

    def __await__(self) -> Generator[Any, None, Result]:
        self.asked = True
        return super().__await__()

    def result(self) -> Result:
        self.asked = True
        return super().result()

    def exception(self) -> BaseException | None:
        self.asked = True
        return super().exception()

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        super().exception()  # what nobody asks for is raised by the stream's close, not logged by asyncio


class StepStream:
    """As ``attnd.StepStream``: several steps in flight on one stream, made by ``Client.step_stream``.

    ::

        async with client.step_stream() as stream:
            pending = [await stream.submit(session, layer, *qkv) for layer, qkv in enumerate(new)]
            outs = [(await step).out for step in pending]

    Leaving the block waits for all answers; leaving it by an exception, a cancelled task's too, cancels what is in
    flight. One that is forgotten is closed once its steps are answered. It belongs to the event loop that made it.
    """

    def __init__(self, steps: Pipeline, max_in_flight: int) -> None:
        self._pipeline = steps
        weakref.finalize(self, pipeline.let_go, steps).atexit = False
        self._loop = asyncio.get_running_loop()
        # Waiting for room is done here, so that the pipeline's own wait, which would block the loop, is never met.
        self._room = asyncio.Semaphore(max_in_flight)
        self._steps: dict[int, PendingStep[Any]] = {}  # what is unanswered, or not delivered yet
        self._failures = Failures()

    async def __aenter__(self) -> StepStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            self.cancel()
            await asyncio.to_thread(self._pipeline.join)

    async def submit(
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
            TypeError, ValueError, ResourceExhausted, RuntimeError, AttndError: as ``attnd.StepStream.submit``.
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
        return await self._send(operation)

    async def submit_segments(
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
        return await self._send(
            step(layer, segments, q, k, v, empty_rows=empty_rows, return_lse=return_lse, out_dtype=out_dtype)
        )

    async def repeat(self, steps: Sequence[PendingStep[Any]]) -> list[PendingStep[Any]]:
        """Submits what another stream left ``unanswered`` once more; see ``attnd.StepStream.repeat``."""
        return [await self._send(operation) for operation in repeated(steps)]

    @property
    def unanswered(self) -> list[PendingStep[Any]]:
        """Steps without an answer, in the order sent: those in flight, or those that the stream's end has left."""
        return [self._steps[step.request_id] for step in self._pipeline.unanswered]

    async def close(self) -> None:
        """Takes no more steps and waits for the answers of those in flight.

        Raises:
            AttndError: the first error of a step whose result nobody asked for.
        """
        self._pipeline.close()
        await asyncio.to_thread(self._pipeline.join)
        self._failures.raise_unasked()

    def cancel(self) -> None:
        """Ends the stream at once; what is unanswered, done or not, fails with ``Cancelled``."""
        self._pipeline.cancel()

    async def _send(self, operation: Operation[Result]) -> PendingStep[Result]:
        await self._room.acquire()
        try:
            sent = self._pipeline.send(operation, asked=True)  # what nobody asks for is in _failures, here
        except BaseException:
            self._room.release()
            raise
        step = PendingStep(operation, sent.request_id)
        self._steps[step.request_id] = step
        sent.add_done_callback(functools.partial(self._hand_over, step))
        return step

    def _hand_over(self, step: PendingStep[Result], sent: pipeline.PendingStep[Result]) -> None:
        """On the pipeline's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, step, sent)

    def _deliver(self, step: PendingStep[Result], sent: pipeline.PendingStep[Result]) -> None:
        self._room.release()
        if sent.operation is None:  # answered
            step.operation = None
            del self._steps[step.request_id]
        error = sent.exception()
        if step.done():  # its wait was cancelled
            return
        if error is None:
            step.set_result(sent.result())
        else:
            self._failures.add(step)
            step.set_exception(error)
