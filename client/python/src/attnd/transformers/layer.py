"""One layer of a RemoteCache, as transformers sees it."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

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
        self._given: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None

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
        self._given = (weakref.ref(key_states), weakref.ref(value_states))
        return key_states, value_states

    def gave(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether the last update() returned these very tensors."""
        return self._given is not None and self._given[0]() is key and self._given[1]() is value

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
        self._refuse_alone()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_alone()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse_alone()

    def _refuse_alone(self) -> NoReturn:
        raise NotImplementedError("the layers of a RemoteCache share their rows: move those of the whole cache")
