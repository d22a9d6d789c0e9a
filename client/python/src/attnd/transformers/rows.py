"""Batch rows: which slots of a batch hold a row's own tokens.

transformers counts slots, padding included; a session counts its row's tokens. All layers see the same slots, each at
its own pace during a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class RowPart:
    """A row's tokens in a step.

    Attributes:
        row: index in the batch.
        start: position of the first token in the row.
        count: tokens, >= 1.
        first: index of the first token among the step's tokens, which stand row after row.
    """

    row: int
    start: int
    count: int
    first: int


@dataclass(frozen=True)
class StepRows:
    """The rows of one step.

    Attributes:
        real: bool [batch, new slots], or None where every slot is a token.
        parts: rows that have tokens in it.
        starts: every row's length before the step.
        lengths: every row's length after it.
        has_holes: some row has padding between its tokens.
    """

    real: BoolArray | None
    parts: tuple[RowPart, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    has_holes: bool


class Rows:
    """Which slots are tokens, for all rows of one batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._real: BoolArray = np.zeros((batch, 0), dtype=np.bool_)
        self._last: tuple[Any, int, int, StepRows] | None = None

    def step(self, padding: BoolArray | None, past: int, new: int, key: Any) -> StepRows:
        """The step that adds ``new`` slots after ``past`` ones.

        Args:
            padding: bool [batch, past + new], False where a slot is padding; None: no padding anywhere.
            key: what tells forward passes apart; the layers of one pass get the same answer without computing it again.

        Raises:
            ValueError: the mask says something else about earlier slots than it did when they were new.
        """
        if self._last is not None and self._last[0] is key and self._last[1:3] == (past, new):
            return self._last[3]
        seen = np.ones((self.batch, past + new), dtype=np.bool_) if padding is None else padding
        if seen.shape != (self.batch, past + new):
            raise ValueError(f"the attention mask is {list(seen.shape)}; {[self.batch, past + new]} is needed")
        if not np.array_equal(seen[:, :past], self._real[:, :past]):
            raise ValueError(
                "the attention mask has changed for tokens that are already in the cache; padding was not stored, and "
                "tokens cannot be hidden later"
            )
        self._real = seen.copy()
        result = _step_rows(seen, past)
        self._last = (key, past, new, result)
        return result

    def select(self, sources: list[int]) -> None:
        """The rows become rows sources[0], sources[1], ...."""
        self._real = self._real[sources]
        self.batch = len(sources)
        self._last = None

    def lengths(self, slots: int) -> tuple[int, ...]:
        """Every row's tokens among the first ``slots`` slots."""
        return tuple(int(n) for n in self._real[:, :slots].sum(axis=1))


def _step_rows(real: BoolArray, past: int) -> StepRows:
    new = real[:, past:]
    starts, counts = real[:, :past].sum(axis=1), new.sum(axis=1)
    parts = []
    first = 0
    for row in np.flatnonzero(counts):
        count = int(counts[row])
        parts.append(RowPart(row=int(row), start=int(starts[row]), count=count, first=first))
        first += count
    lengths = starts + counts
    # Without holes the tokens of a row span as many slots as there are tokens.
    span = np.where(lengths > 0, real.shape[1] - real.argmax(axis=1) - real[:, ::-1].argmax(axis=1), 0)
    return StepRows(
        real=None if new.all() else new,
        parts=tuple(parts),
        starts=tuple(int(n) for n in starts),
        lengths=tuple(int(n) for n in lengths),
        has_holes=bool((span != lengths).any()),
    )
