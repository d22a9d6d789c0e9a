"""A call without its transport: what is sent, and what is made of the answer. Both clients run the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Operation(Generic[Result]):
    """Attributes:
    method: of the service.
    request: its message.
    result: makes the answer's message into what the caller gets.
    idempotent: a second execution does no harm.
    """

    method: str
    request: Any
    result: Callable[[Any], Result]
    idempotent: bool
