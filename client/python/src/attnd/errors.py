"""Errors as exceptions: one class per kind, each with the gRPC code, the reason, and how long to wait.

======================  ====================================================================================
class                   when
======================  ====================================================================================
InvalidArgument         a shape, dtype, byte count or option disagrees; a value is not finite; an empty row
SessionLost             NOT_FOUND: the session NEVER_EXISTED here, EXPIRED, was EVICTED or is CLOSED; or DATA_LOSS:
                        it was on disk and its file is damaged (SPILL_DAMAGED)
BadPosition             start_position is neither append, replay nor rewind; ``length`` is the current length
TokensFreed             a position that would see tokens which a layer's window has passed; ``first_token`` is held
TooLong                 a history that is longer than the max_tokens of the session that should take it
CacheFull               no room for the tokens now; ``retry_delay`` says when it may be worth trying again
TooManyTokens           beyond the session's max_tokens, or more than the cache could ever hold
QueueFull, SessionLimit the server's queue or number of sessions is full
Unavailable             no connection, or the server is draining
DeadlineExceeded        no answer within the timeout
======================  ====================================================================================
"""

from __future__ import annotations

from typing import Any

import grpc

from .v1 import attnd_pb2 as pb
from .v1 import error_details_pb2


class AttndError(Exception):
    """A call that failed.

    Attributes:
        code: the ``grpc.StatusCode``.
        reason: UPPER_SNAKE_CASE, e.g. "EXPIRED"; empty when the transport failed.
        metadata: the numbers of the message by name, as text.
        retry_delay: seconds after which it is worth trying again, or None when waiting does not help.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_delay: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_delay = retry_delay

    def __str__(self) -> str:
        kind = self.code.name + (f", {self.reason}" if self.reason else "")
        return f"{self.message} [{kind}]"


class InvalidArgument(AttndError, ValueError):
    pass


class SessionLost(AttndError, LookupError):
    """The server has no such session any more. Its tokens are gone: send them again to a new session."""


class FailedPrecondition(AttndError):
    """The session is not in a state where this can be done."""


class BadPosition(FailedPrecondition):
    @property
    def length(self) -> int | None:
        """The layer's current length in tokens, if the server said it."""
        text = self.metadata.get("length")
        return int(text) if text is not None else None


class TokensFreed(FailedPrecondition):
    @property
    def first_token(self) -> int | None:
        """The position of the oldest token that the layer still holds, if the server said it."""
        text = self.metadata.get("first_token")
        return int(text) if text is not None else None


class TooLong(FailedPrecondition):
    pass


class ResourceExhausted(AttndError):
    pass


class CacheFull(ResourceExhausted):
    pass


class QueueFull(ResourceExhausted):
    pass


class SessionLimit(ResourceExhausted):
    pass


class TooManyTokens(ResourceExhausted):
    pass


class Unavailable(AttndError):
    pass


class DeadlineExceeded(AttndError, TimeoutError):
    pass


class Cancelled(AttndError):
    pass


class Unauthenticated(AttndError):
    pass


class PermissionDenied(AttndError):
    pass


_BY_CODE: dict[grpc.StatusCode, type[AttndError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: SessionLost,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}

_BY_REASON: dict[tuple[grpc.StatusCode, str], type[AttndError]] = {
    (grpc.StatusCode.DATA_LOSS, "SPILL_DAMAGED"): SessionLost,
    (grpc.StatusCode.FAILED_PRECONDITION, "BAD_POSITION"): BadPosition,
    (grpc.StatusCode.FAILED_PRECONDITION, "TOKENS_FREED"): TokensFreed,
    (grpc.StatusCode.FAILED_PRECONDITION, "TOO_LONG"): TooLong,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "CACHE_FULL"): CacheFull,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"): QueueFull,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "SESSION_LIMIT"): SessionLimit,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_TOKENS"): TooManyTokens,
}

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def make_error(
    code: grpc.StatusCode,
    message: str,
    reason: str = "",
    metadata: dict[str, str] | None = None,
    retry_delay: float | None = None,
) -> AttndError:
    kind = _BY_REASON.get((code, reason)) or _BY_CODE.get(code, AttndError)
    return kind(message, code=code, reason=reason, metadata=metadata, retry_delay=retry_delay)


def error_of_segment(status: pb.StepStatus) -> AttndError:
    """The exception of a failed segment of a step."""
    delay = status.retry_delay.ToTimedelta().total_seconds() if status.HasField("retry_delay") else None
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return make_error(code, status.message, status.reason, dict(status.metadata), delay)


def error_of_call(failure: Any) -> AttndError:
    """The exception of a ``grpc.RpcError``, with the details that the server sent in ``grpc-status-details-bin``."""
    reason, metadata, delay = "", None, None
    for key, value in failure.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in error_details_pb2.ErrorStatus.FromString(value).details:
            # Told by the type's name: the messages are google.rpc's under attnd's own package.
            if detail.type_url.endswith("/google.rpc.ErrorInfo"):
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.type_url.endswith("/google.rpc.RetryInfo"):
                retry = error_details_pb2.RetryInfo.FromString(detail.value)
                delay = retry.retry_delay.ToTimedelta().total_seconds()
    return make_error(failure.code(), failure.details() or "", reason, metadata, delay)
