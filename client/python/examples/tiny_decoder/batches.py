"""Documents as rows of tensors, in which each token is predicted exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the target that torch's cross entropy leaves out

Tokens = Sequence[int]


@dataclass(frozen=True)
class Row:
    """Part of a document.

    Attributes:
        document: its index among those that were cut.
        inputs: at most ``context`` tokens.
        targets: as many: the token after each input, or IGNORED where an earlier row predicts it, with more before it.
    """

    document: int
    inputs: list[int]
    targets: list[int]


def rows(documents: Sequence[Tokens], context: int) -> list[Row]:
    """A document that fits is one row; of a longer one's rows each overlaps the one before by half the context.

    So at least half the context is before each target, but for those of a document's first row.
    """
    if context < 2:
        raise ValueError(f"a context of {context} cannot overlap by half")
    cut = []
    for number, document in enumerate(documents):
        last = len(document) - 1
        start = done = 0
        while done < last:
            end = min(start + context, last)
            targets = [IGNORED] * (done - start) + list(document[done + 1 : end + 1])
            cut.append(Row(number, list(document[start:end]), targets))
            start, done = end - context // 2, end
    return cut


def batch(chosen: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, tokens], padded at the end: causal attention never looks there."""
    longest = max(len(row.inputs) for row in chosen)
    inputs = torch.zeros(len(chosen), longest, dtype=torch.long)
    targets = torch.full((len(chosen), longest), IGNORED)
    for number, row in enumerate(chosen):
        inputs[number, : len(row.inputs)] = torch.tensor(row.inputs)
        targets[number, : len(row.targets)] = torch.tensor(row.targets)
    return inputs, targets


def by_length(all_rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Batches of rows of similar lengths, so that little is padding."""
    ordered = sorted(all_rows, key=lambda row: len(row.inputs))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def shuffled(all_rows: Sequence[Row], size: int, steps: int, seed: int) -> Iterator[list[Row]]:
    """``steps`` batches in random order, each row once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    for _ in range(steps):
        while len(waiting) < size:
            waiting += torch.randperm(len(all_rows), generator=generator).tolist()
        yield [all_rows[number] for number in waiting[:size]]
        del waiting[:size]
