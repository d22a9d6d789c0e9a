"""Where the decoder's attention is computed. Everything else of it is the same in all three places."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnd
import attnd.torch


class Attention(Protocol):
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of one layer; all are [documents, heads, tokens, head_dim]."""


class LocalAttention:
    """torch's, in this process: what attnd is compared with."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)


class RemoteAttention:
    """attnd's stateless calls, forward and backward: one of each per layer and batch, the documents being heads."""

    def __init__(self, client: attnd.Client) -> None:
        self._client = client

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attnd.torch.attention(query, key, value, client=self._client, causal=True)


class SessionAttention:
    """attnd's cache: the new tokens of one document are appended and see all that the session has. Forward only."""

    def __init__(self, session: attnd.Session, start_position: int = 0) -> None:
        self._session = session
        self._start = start_position

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(query) != 1:
            raise ValueError(f"a session is one document's, and these are {len(query)}")
        # A session's rows are tokens, then heads.
        q, k, v = (tensor[0].transpose(0, 1).detach().numpy() for tensor in (query, key, value))
        out = self._session.step(layer, q, k, v, start_position=self._start).out
        return torch.from_numpy(out).transpose(0, 1)[None]
