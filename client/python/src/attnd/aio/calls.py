"""One call with its deadline and its attempts, as ``attnd.calls`` has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ..calls import Attempts
from ..errors import error_of_call
from ..operation import Operation, Result


async def call(
    method: Callable[..., Awaitable[Any]],
    operation: Operation[Result],
    timeout: float,
    metadata: tuple[tuple[str, str], ...],
) -> Result:
    """Raises AttndError as the server or the transport failed. A cancelled task cancels the call."""
    attempts = Attempts(timeout, idempotent=operation.idempotent)
    while True:
        try:
            answer = await method(operation.request, timeout=attempts.seconds_left(), metadata=metadata)
        except grpc.RpcError as failure:
            error = error_of_call(failure)
        else:
            return operation.result(answer)
        await asyncio.sleep(attempts.delay_after(error))
