"""Splits a corpus by document, before anything is counted, and takes out what the parts have in common.

A held-out document that was trained on, perhaps with another spelling, would measure memory. So validation and
held-out documents that resemble one of an earlier part, or one kept before them in their own, are removed and counted.
Documents of the training part may resemble each other: that is what there is to learn from.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .data import Document

SHINGLE = 4  # words
NEAR = 0.6  # of the shingles of two documents

Shingles = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class Split:
    """Documents of three parts that have none in common.

    Attributes:
        train: what is learned and counted from: the tokenizer, the baselines, the weights.
        validation: chooses the baselines' smoothing, and is looked at during training.
        heldout: scored once, at the end.
        removed: per part and reason ("exact", "normalised", "near"), how many documents.
        examples: some near duplicates, as (removed, the one it resembles, similarity).
    """

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    heldout: tuple[Document, ...]
    removed: dict[str, dict[str, int]]
    examples: tuple[tuple[str, str, float], ...]


def words(text: str) -> tuple[str, ...]:
    """Words and marks, without regard to case, spacing and how Unicode composes them."""
    return tuple(re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFKC", text).casefold()))


def shingles(text: str) -> Shingles:
    """All runs of four words; a shorter text is one."""
    found = words(text)
    return frozenset(found[start : start + SHINGLE] for start in range(max(1, len(found) - SHINGLE + 1)))


def similarity(one: Shingles, other: Shingles) -> float:
    """What part of all their shingles both have (Jaccard's index)."""
    return len(one & other) / len(one | other)


class Known:
    """Documents that others must not resemble."""

    def __init__(self, documents: Iterable[Document] = ()) -> None:
        self._texts: set[str] = set()
        self._words: set[tuple[str, ...]] = set()
        self._shingles: list[tuple[Shingles, str]] = []
        self._holders: dict[tuple[str, ...], list[int]] = {}
        for document in documents:
            self.add(document)

    def add(self, document: Document) -> None:
        self._texts.add(document.text)
        self._words.add(words(document.text))
        pieces = shingles(document.text)
        for piece in pieces:
            self._holders.setdefault(piece, []).append(len(self._shingles))
        self._shingles.append((pieces, document.text))

    def reason(self, document: Document) -> str | None:
        """Which kind of duplicate it is; None: of no document here."""
        if document.text in self._texts:
            return "exact"
        if words(document.text) in self._words:
            return "normalised"
        return "near" if self.nearest(document)[1] >= NEAR else None

    def nearest(self, document: Document) -> tuple[str, float]:
        """The most similar text, and how similar it is; ("", 0) when no shingle is shared."""
        pieces = shingles(document.text)
        # Sorted, for a tie must not be broken by the order of a set.
        shared = Counter(holder for piece in sorted(pieces) for holder in self._holders.get(piece, ()))
        best, text = 0.0, ""
        for holder, both in shared.items():
            theirs, candidate = self._shingles[holder]
            index = both / (len(pieces) + len(theirs) - both)
            if index > best:
                best, text = index, candidate
        return text, best


def split(
    documents: Sequence[Document], seed: int, validation: float = 0.1, heldout: float = 0.1, examples: int = 3
) -> Split:
    """Draws the parts by document and removes duplicates between them."""
    if not (validation > 0 and heldout > 0 and validation + heldout < 1):
        raise ValueError(f"validation {validation}, heldout {heldout}: of 1, something must be left for each part")
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    ends = [round(len(shuffled) * part) for part in (heldout, heldout + validation)]
    drawn = {"validation": shuffled[ends[0] : ends[1]], "heldout": shuffled[: ends[0]]}
    train = shuffled[ends[1] :]
    known = Known(train)
    kept: dict[str, list[Document]] = {"validation": [], "heldout": []}
    removed = {part: {"exact": 0, "normalised": 0, "near": 0} for part in kept}
    near = []
    for part, candidates in drawn.items():
        for document in candidates:
            reason = known.reason(document)
            if reason is None:
                kept[part].append(document)
                known.add(document)
                continue
            removed[part][reason] += 1
            if reason == "near":
                near.append((document.text, *known.nearest(document)))
    return Split(tuple(train), tuple(kept["validation"]), tuple(kept["heldout"]), removed, tuple(near[:examples]))
