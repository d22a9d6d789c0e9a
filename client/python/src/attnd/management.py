"""What is done to sessions and asked of the server, but for their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .config import SessionConfig
from .handle import session_id_of
from .operation import Operation
from .results import ServerInfo, SessionInfo
from .v1 import attnd_pb2 as pb


def create_session(config: SessionConfig | None, fields: dict[str, Any]) -> Operation[SessionInfo]:
    if config is None:
        config = SessionConfig(**fields)
    elif fields:
        raise TypeError(f"a config and its fields ({', '.join(fields)}) were both given")
    request = pb.CreateSessionRequest(config=config.message())
    return Operation("CreateSession", request, SessionInfo.of_message, idempotent=False)


def rewind(session: Any, length: int) -> Operation[SessionInfo]:
    request = pb.RewindSessionRequest(session_id=session_id_of(session), length=length)
    return Operation("RewindSession", request, SessionInfo.of_message, idempotent=False)


def fork(session: Any, length: int | None) -> Operation[SessionInfo]:
    request = pb.ForkSessionRequest(session_id=session_id_of(session), length=length)
    return Operation("ForkSession", request, SessionInfo.of_message, idempotent=False)


def reorder(sessions: Sequence[Any], sources: Sequence[int]) -> Operation[list[int]]:
    request = pb.ReorderSessionsRequest(session_ids=map(session_id_of, sessions), sources=sources)
    return Operation("ReorderSessions", request, lambda answer: list(answer.lengths), idempotent=False)


def get_session(session: Any) -> Operation[SessionInfo]:
    request = pb.GetSessionRequest(session_id=session_id_of(session))
    return Operation("GetSession", request, SessionInfo.of_message, idempotent=True)


def list_sessions(page_size: int, page_token: str) -> Operation[tuple[list[SessionInfo], str]]:
    """A page, and the token of the next one; empty after the last."""
    request = pb.ListSessionsRequest(page_size=page_size, page_token=page_token)

    def page(answer: pb.ListSessionsResponse) -> tuple[list[SessionInfo], str]:
        return [SessionInfo.of_message(session) for session in answer.sessions], answer.next_page_token

    return Operation("ListSessions", request, page, idempotent=True)


def close_session(session: Any) -> Operation[bool]:
    request = pb.CloseSessionRequest(session_id=session_id_of(session))
    return Operation("CloseSession", request, lambda answer: bool(answer.was_open), idempotent=True)


def server_info(config: SessionConfig | None) -> Operation[ServerInfo]:
    request = pb.GetServerInfoRequest(config=None if config is None else config.message())
    return Operation("GetServerInfo", request, ServerInfo.of_message, idempotent=True)
