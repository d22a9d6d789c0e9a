"""Steps that are sent before earlier ones are answered, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any

import grpc

from ..errors import AttndError, Cancelled, error_of_call
from ..handle import SessionHandle
from ..operation import Operation, Result
from ..pipeline import Pipeline, check_size, repeated
from ..results import StepResult
from ..stall import stall_error
from ..steps import Segment, session_step, step
from ..v1 import attnd_pb2 as pb
from .channel import Channel


class PendingStep(asyncio.Future[Result]):
    """A step that was submitted; awaiting it waits for the answer and raises as ``Session.step``.

    Cancelling it only ends the wait: the step is on its way.

    Attributes:
        request_id: counts the stream's steps from 1.
    """

    def __init__(self, operation: Operation[Result]) -> None:
        super().__init__()
        self.operation = operation
        self.request_id = 0
        self.asked = False

    @property
    def repeatable(self) -> bool:
        """Every segment has its start_position: after a stream that broke, ``StepStream.repeat`` takes the step."""
        return self.operation.idempotent

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
    flight. It belongs to the event loop that made it.
    """

    def __init__(self, channel: Channel, max_in_flight: int, timeout: float) -> None:
        self._pipeline: Pipeline[PendingStep[Any]] = Pipeline(max_in_flight)
        self._room = asyncio.Semaphore(max_in_flight)
        self._outgoing: asyncio.Queue[pb.StepRequest | None] = asyncio.Queue()
        self._closing = False
        self._timeout = timeout
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._call = channel.stub().StepStream(metadata=channel.endpoint.metadata)
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._read()), self._loop.create_task(self._write())]

    async def __aenter__(self) -> StepStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            self.cancel()
            await asyncio.wait(self._tasks)

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
        return list(self._pipeline.unanswered.values())

    async def close(self) -> None:
        """Takes no more steps and waits for the answers of those in flight.

        Raises:
            AttndError: the first error of a step whose result nobody asked for.
        """
        if not self._closing:
            self._closing = True
            self._outgoing.put_nowait(None)
            self._wait_begins()
        await asyncio.wait(self._tasks)
        self._pipeline.raise_unasked()

    def cancel(self) -> None:
        """Ends the stream at once; what is unanswered, done or not, fails with ``Cancelled``."""
        self._closing = True
        self._stop(Cancelled("the stream was cancelled", code=grpc.StatusCode.CANCELLED))

    async def _send(self, operation: Operation[Result]) -> PendingStep[Result]:
        check_size(operation.request)
        await self._room.acquire()
        if self._closing or self._pipeline.ended is not None:
            self._room.release()
            if self._closing:
                raise RuntimeError("a step was submitted to a StepStream that is closed")
            assert self._pipeline.ended is not None
            raise self._pipeline.ended
        pending = PendingStep(operation)
        if not self._pipeline.unanswered:
            self._wait_begins()
        self._outgoing.put_nowait(self._pipeline.add(pending))
        return pending

    async def _write(self) -> None:
        try:
            while (request := await self._outgoing.get()) is not None:
                await self._call.write(request)
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream has ended; _read learns why

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._answer(response)
        except grpc.RpcError as failure:
            self._stop(error_of_call(failure))
        except AttndError as unexpected:
            self._stop(unexpected)
        else:
            self._stop(None)
        finally:
            # Only when the loop ends all of its tasks is there still something to stop.
            self._stop(Cancelled("the event loop has ended the stream", code=grpc.StatusCode.CANCELLED))

    def _answer(self, response: pb.StepResponse) -> None:
        pending = self._pipeline.take(response)
        self._room.release()
        if self._pipeline.unanswered or self._closing:
            self._wait_begins()
        else:
            self._deadline = None
        self._pipeline.settle(pending, response)

    def _stop(self, error: AttndError | None) -> None:
        if self._pipeline.ended is not None:
            return
        lost = self._pipeline.end(error)
        self._pipeline.fail(lost)
        for _ in range(self._pipeline.max_in_flight):  # whoever waits for room learns of the end
            self._room.release()
        if self._timer is not None:
            self._timer.cancel()
        self._call.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _wait_begins(self) -> None:
        self._deadline = self._loop.time() + self._timeout
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        else:
            self._stop(stall_error("the server answered no step", self._timeout))
