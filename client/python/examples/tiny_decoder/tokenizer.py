"""A byte-level BPE tokenizer, learned from the training part alone.

All 256 bytes are tokens, so every text can be written and none is free: where a tokenizer with an "unknown" token would
get a rare word for the price of that one token, this one spells it. What held-out text has that the training part never
showed is counted instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from .data import Document
from .split import words

BOUNDARY = "<document>"


@dataclass(frozen=True)
class Unseen:
    """What a part has that the training part has not.

    Attributes:
        tokens, of_tokens: tokens that never occur in the training part, and all.
        words, of_words: the same in words, whatever their case.
    """

    tokens: int
    of_tokens: int
    words: int
    of_words: int


class Tokenizer:
    """Texts as tokens, 0 to size - 1. Token ``boundary`` begins and ends every document."""

    boundary = 0

    def __init__(self, texts: Iterable[str], size: int) -> None:
        least = 257
        if size < least:
            raise ValueError(f"a vocabulary of {size} has no place for 256 bytes and the boundary")
        self._bpe = BpeTokenizer(BPE())
        self._bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self._bpe.decoder = ByteLevelDecoder()
        trainer = BpeTrainer(
            vocab_size=size,
            special_tokens=[BOUNDARY],
            initial_alphabet=ByteLevel.alphabet(),
            min_frequency=2,
            show_progress=False,
        )
        self._bpe.train_from_iterator(texts, trainer)
        # A document that has the marker in its text is still one document.
        self._bpe.encode_special_tokens = True
        self.size: int = self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Without boundaries."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def document(self, text: str) -> list[int]:
        """With both boundaries: each token but the first is to be predicted from those before it."""
        return [self.boundary, *self.encode(text), self.boundary]

    def decode(self, tokens: Sequence[int]) -> str:
        """Boundaries leave no trace."""
        return str(self._bpe.decode([token for token in tokens if token != self.boundary]))

    def documents(self, documents: Iterable[Document]) -> list[list[int]]:
        return [self.document(document.text) for document in documents]


def unseen(tokenizer: Tokenizer, train: Sequence[Document], part: Sequence[Document]) -> Unseen:
    known_tokens = {token for document in train for token in tokenizer.encode(document.text)}
    known_words = {word for document in train for word in words(document.text)}
    tokens = [token for document in part for token in tokenizer.encode(document.text)]
    spoken = [word for document in part for word in words(document.text)]
    return Unseen(
        tokens=sum(token not in known_tokens for token in tokens),
        of_tokens=len(tokens),
        words=sum(word not in known_words for word in spoken),
        of_words=len(spoken),
    )
