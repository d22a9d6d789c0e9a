"""Client of attnd: the key/value cache of autoregressive transformers, and their attention, as a service.

::

    import attnd, numpy as np

    with attnd.Client("127.0.0.1:50051") as client:
        with client.create_session(num_q_heads=8, num_kv_heads=2, head_dim=64) as session:
            q = np.random.randn(5, 8, 64).astype(np.float32)       # [tokens, heads, dim]
            k, v = np.random.randn(2, 5, 2, 64).astype(np.float32)
            out = session.step(0, q, k, v).out                     # [5, 8, 64]

``attnd.transformers.RemoteCache`` puts a Hugging Face model's cache there.
"""

from .backward import AttendGradients
from .client import Client
from .config import SessionConfig
from .errors import (
    AttndError,
    BadPosition,
    CacheFull,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    QueueFull,
    ResourceExhausted,
    SessionLimit,
    SessionLost,
    TokensFreed,
    TooLong,
    TooManyTokens,
    Unauthenticated,
    Unavailable,
)
from .results import AttendResult, ServerInfo, SessionInfo, StepResult
from .session import Session
from .steps import Segment

__all__ = [
    "AttendGradients",
    "AttendResult",
    "AttndError",
    "BadPosition",
    "CacheFull",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "PermissionDenied",
    "QueueFull",
    "ResourceExhausted",
    "Segment",
    "ServerInfo",
    "Session",
    "SessionConfig",
    "SessionInfo",
    "SessionLimit",
    "SessionLost",
    "StepResult",
    "TokensFreed",
    "TooLong",
    "TooManyTokens",
    "Unauthenticated",
    "Unavailable",
]
