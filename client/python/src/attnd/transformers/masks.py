"""The mask that transformers would have built, kept as what it is made of.

Models pass whatever the mask function returns on to the attention function, as they do with flex attention's BlockMask.
So a ``MaskPlan`` travels instead of a tensor: a remote layer takes the padding from it and checks that the rest is what
the server computes (causal, with or without a window); a local call builds the real mask from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

# Of the attention implementation and of its mask function, where transformers registers them.
NAME = "attnd"

# Query rows are compared with the expected mask in blocks of this many elements.
_BLOCK_ELEMENTS = 1 << 22


class NotATensor(NotImplementedError, AttributeError):
    """A model reads its mask as a tensor: it changes it, or computes something from it."""


class MaskPlan:
    """One mask of one forward pass.

    Attributes:
        padding: bool [batch, kv_length], False where a slot is padding; None: no padding.
        q_offset, q_length, kv_length: in slots, padding included.
        pass_start: the slot where the forward pass begins, also in the mask of some of its queries only.
    """

    def __init__(self, arguments: dict[str, Any], pass_start: int | None = None) -> None:
        self._arguments = arguments
        self.q_offset = int(arguments["q_offset"])
        self.pass_start = self.q_offset if pass_start is None else pass_start
        self.q_length = int(arguments["q_length"])
        self.kv_length = int(arguments["kv_length"])
        self._built: dict[str, Any] = {}
        self._checked: set[int | None] = set()
        self.padding = self._padding()

    def __getattr__(self, name: str) -> Any:
        raise NotATensor(
            f"{self._owner()} reads its attention mask ({name}) before the attention; that is not supported"
        )

    def __getitem__(self, index: Any) -> MaskPlan:
        """mask[:, :, a:b, :], the mask of some of the queries only (Gemma 4's last layers); nothing else."""
        everything = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and isinstance(index[2], slice):
            first, last, stride = index[2].indices(self.q_length)
            if (*index[:2], index[3]) == (everything,) * 3 and stride == 1 and first < last:
                chosen = {"q_offset": self.q_offset + first, "q_length": last - first}
                return MaskPlan({**self._arguments, **chosen}, self.pass_start)
        raise NotATensor(f"{self._owner()} cuts its attention mask before the attention; that is not supported")

    def _owner(self) -> str:
        """The model, by its configuration: nothing else is known where a mask is made."""
        return str(type(self._arguments.get("config")).__name__).removesuffix("Config") or "the model"

    def build(self, implementation: str) -> Any:
        """The mask of a local attention implementation."""
        if implementation not in self._built:
            function = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
            self._built[implementation] = None if function is None else function(**self._arguments)
        return self._built[implementation]

    def check_pattern(self, window: int | None, model_name: str) -> None:
        """Raises NotImplementedError unless, padding aside, the mask is causal with this window."""
        if window in self._checked:
            return
        arguments = self._arguments
        function = arguments["mask_function"]
        if function is not causal_mask_function or window is not None:
            if arguments.get("use_vmap"):
                raise NotImplementedError(f"{model_name} adds a mask function of its own to the causal mask")
            if not self._equals_causal(function, window):
                described = "a causal mask" if window is None else f"a causal mask with a window of {window}"
                raise NotImplementedError(f"{model_name} asks for a mask that is not {described}")
        self._checked.add(window)

    def _padding(self) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        mask = self._arguments.get("attention_mask")
        if mask is None:
            return None
        padding: np.ndarray[Any, np.dtype[np.bool_]] = mask.detach().to("cpu", torch.bool).numpy()
        missing = self.kv_length - padding.shape[1]
        if missing > 0:
            # transformers pads a short mask with False as well.
            padding = np.pad(padding, ((0, 0), (0, missing)))
        return None if padding.all() else padding

    def _equals_causal(self, function: Any, window: int | None) -> bool:
        keys = torch.arange(self.kv_length)[None, None, None, :]
        batch = torch.arange(self._arguments["batch_size"])[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        device = self._arguments.get("device", "cpu")
        rows = max(1, _BLOCK_ELEMENTS // max(self.kv_length, 1))
        for first in range(0, self.q_length, rows):
            last = min(first + rows, self.q_length)
            queries = torch.arange(self.q_offset + first, self.q_offset + last)[None, None, :, None]
            expected = keys <= queries
            if window is not None:
                expected = expected & (keys > queries - window)
            actual = function(*(index.to(device) for index in (batch, head, queries, keys)))
            if not bool((torch.as_tensor(actual).to("cpu") == expected).all()):
                return False
        return True


def mask_plan(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> MaskPlan:
    """Registered as the mask function of attnd's attention."""
    return MaskPlan(
        dict(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **others,
        )
    )
