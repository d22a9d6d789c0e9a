"""One layer of a RemoteCache, as transformers sees it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .attention import set_pending
from .remote import RemoteState


class RemoteLayer(CacheLayerMixin):
    """Counts slots, and hands the new K and V on to the attention function, which sends them."""

    is_compileable = False
    # Assisted generation asks for it.
    is_croppable = True
    # The server keeps all tokens and applies the window itself: masks are made for all slots.
    is_sliding = False

    def __init__(self, state: RemoteState, index: int) -> None:
        super().__init__()
        self.state = state
        self.index = index
        self.value: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new K and V only, marked: the attention function must be given these very tensors."""
        self.state.check_usable()
        self.is_initialized = True
        set_pending(self)
        # A view of its own: a tensor that a model keeps and attends to later must not carry an old mark.
        key_states = key_states.view_as(key_states)
        key_states.attnd_layer = self  # type: ignore[attr-defined]
        self.value = value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.state.slots[self.index]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name of get_max_length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Negative: remove that many slots. Positive: keep that many (releases before 5.18)."""
        if tokens_to_remove > 0:
            self.state.crop(self.index, max(self.get_seq_length() - tokens_to_remove, 0))
        else:
            self.state.crop(self.index, -tokens_to_remove)

    def reset(self) -> None:
        """Of the whole cache: its layers share their sessions."""
        if any(self.state.slots):
            self.state.reset()
        self.is_initialized = False

    def offload(self) -> None:
        pass

    def prefetch(self) -> None:
        pass

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("the layers of a RemoteCache share their rows: reorder the whole cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_if_filled("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse_if_filled("batch_select_indices")

    def _refuse_if_filled(self, what: str) -> None:
        if self.get_seq_length() > 0:
            raise NotImplementedError(f"{what} of a filled RemoteCache needs forked sessions, which it has not")
