"""What a session is to its client, whichever client that is."""

from __future__ import annotations

from typing import Any

from .config import SessionConfig
from .results import SessionInfo
from .tensors import WireTensor


class SessionHandle:
    """Attributes:
    session_id: 128 random bits; ``list_sessions`` shows it to every client that the server lets in.
    config: with its defaults filled in.
    """

    def __init__(self, info: SessionInfo) -> None:
        self.session_id = info.session_id
        self.config: SessionConfig = info.config

    def __repr__(self) -> str:
        return f"{type(self).__module__.removesuffix('.session')}.Session({self.session_id!r})"

    def check_shapes(self, q: WireTensor | None, k: WireTensor | None, v: WireTensor | None) -> None:
        """Raises ValueError for a tensor that has not this session's heads and dims: [heads, tokens, dim], say, would
        have the right number of bytes."""
        config = self.config
        kv_heads = config.num_q_heads if config.num_kv_heads is None else config.num_kv_heads
        value_dim = config.value_dim or config.head_dim
        expected = {
            "q": (q, config.num_q_heads, config.head_dim),
            "k": (k, kv_heads, config.head_dim),
            "v": (v, kv_heads, value_dim),
        }
        for name, (tensor, heads, dim) in expected.items():
            if tensor is not None and tensor.shape[1:] != (heads, dim):
                raise ValueError(f"{name} has shape {list(tensor.shape)}; the session needs [tokens, {heads}, {dim}]")


def session_id_of(session: Any) -> str:
    """Of a session's handle, or the id itself."""
    return str(getattr(session, "session_id", session))
