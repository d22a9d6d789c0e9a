"""RemoteCache: a transformers cache whose K and V, and whose attention, are in attnd."""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache

from ..client import DEFAULT_TIMEOUT, Client
from ..tensors import KV_DTYPES, choice
from .attention import attach, release, restore_if_unused
from .layer import RemoteLayer
from .remote import RemoteState
from .sessions import RemoteOptions
from .support import check_supported, layer_windows


class RemoteCache(Cache):
    """Given to ``model.generate(**inputs, cache=...)``, or to the model itself.

    Each batch row is a session; padding is never sent, so a row's answers are those of the row alone. A layer's call
    is one Step with all rows, at positions that are said explicitly: a lost answer is asked for again. Q, K and V
    travel in the model's dtype, and the answers come back in it.

    The model's attention stays on attnd until the last of its caches is closed; calls that do not belong to a
    RemoteCache (vision towers, forward passes without a cache) use the attention that the model had before.

    Args:
        model: a transformers model whose attention goes through the attention interface.
        server: "host:port", or an ``attnd.Client``, which the cache then does not close.
        kv_dtype: how K and V are stored: "f32", "bf16", "f16" or "int8".
        max_tokens: longest row; None: as the server's cache allows.
        ttl: seconds of idleness after which the rows expire; None: the server's.
        reserve_tokens: cache memory taken at once for this many tokens of every row; where layers differ in heads or
            dims (Gemma 4), for as many again with each sort of layer.
        token, tls_roots, timeout: of the ``attnd.Client`` that is made for "host:port".

    Raises:
        NotImplementedError: the model, or an option of a later call, would give a result that silently differs: an
            attention that does not go through the interface, K or V changed after the cache, masks other than causal
            with padding and windows, dropout, gradients, attention weights.
    """

    def __init__(
        self,
        model: Any,
        server: str | Client,
        *,
        kv_dtype: str = "f32",
        max_tokens: int | None = None,
        ttl: float | None = None,
        reserve_tokens: int = 0,
        token: str | None = None,
        tls_roots: str | os.PathLike[str] | bytes | bool | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        check_supported(model)
        choice("kv_dtype", kv_dtype, KV_DTYPES)
        self._own_client = None
        if isinstance(server, Client):
            client = server
        else:
            client = self._own_client = Client(server, token=token, tls_roots=tls_roots, timeout=timeout)
        config = model.config.get_text_config(decoder=True)
        options = RemoteOptions(kv_dtype, max_tokens, ttl, reserve_tokens)
        windows = layer_windows(config)
        self.state = RemoteState(client, type(model).__name__, config, windows, options)
        super().__init__(layers=[RemoteLayer(self.state, index) for index in range(len(windows))])
        attach(model)
        self._model = weakref.ref(model)
        # The layers refer to the state and not to the cache, so it goes as soon as nobody holds it.
        self._finalizer = weakref.finalize(self, _close, self.state, self._own_client, self._model)

    def __enter__(self) -> RemoteCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def session_ids(self) -> list[str]:
        """The rows' sessions, in the order of the batch; where layers differ in heads or dims, set after set."""
        return self.state.sessions.ids()

    def close(self) -> None:
        """Frees the sessions, and gives the model its attention back when this is its last cache."""
        if not self._finalizer.alive:
            return
        self._finalizer()
        # Not when the cache is merely collected: that may happen in the middle of another forward pass.
        model = self._model()
        if model is not None:
            restore_if_unused(model)

    def reset(self) -> None:
        """Empties the cache; it can be used again, for a batch of another size as well."""
        self.state.reset()
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: row i goes on with the tokens of row beam_idx[i]. The server shares them and copies nothing."""
        self.state.reorder([int(row) for row in beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one copy after the other. Forks on the server, which copy nothing."""
        self.state.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The rows become those named, in this order: forked where named twice, closed where not named."""
        self.state.select(indices)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise NotImplementedError("a copy of a RemoteCache would share its sessions; run the prompt in a new one")

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("a RemoteCache is a connection and cannot be pickled or copied")


def _close(state: RemoteState, client: Client | None, model_reference: weakref.ref[Any]) -> None:
    model = model_reference()
    if model is not None:
        release(model)
    state.closed = True
    state.sessions.close()
    if client is not None:
        client.close()
