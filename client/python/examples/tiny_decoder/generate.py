"""Generates token by token through attnd's cache: a step per layer sends the new token's Q, K and V alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import attnd

from .attention import Attention, SessionAttention
from .model import Decoder
from .tokenizer import Tokenizer


class Reader:
    """One document that is read into a session, in pieces of any length. A context manager."""

    def __init__(self, model: Decoder, client: attnd.Client) -> None:
        config = model.config
        self._model = model
        self._length = 0
        self._session = client.create_session(
            num_layers=config.layers, num_q_heads=config.heads, head_dim=config.head_dim, max_tokens=config.context
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        self._session.__exit__(kind, value, trace)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """The logits at each of these tokens, [tokens, vocabulary], after all that were read before.

        Raises:
            ValueError: beyond the model's context.
        """
        attention = SessionAttention(self._session, self._length)
        with torch.no_grad():
            logits: Tensor = self._model(torch.tensor([list(tokens)]), attention, start_position=self._length)[0]
        self._length += len(tokens)
        return logits


@dataclass(frozen=True)
class Generated:
    """Attributes:
    tokens: the new ones, without the boundary.
    probabilities: the model's, of each of them, and then of the boundary if that came.
    ended: whether the boundary came, or else there was no more room.
    """

    tokens: list[int]
    probabilities: list[float]
    ended: bool


def generate(
    model: Decoder,
    client: attnd.Client,
    prompt: Sequence[int],
    most: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Generated:
    """Goes on after a prompt that begins with the boundary, until the next one or ``most`` tokens.

    Args:
        temperature: 0 takes the most probable token.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    probabilities: list[float] = []
    most = min(most, model.config.context - len(prompt))
    with Reader(model, client) as reader:
        logits = reader.read(prompt)[-1]
        while len(tokens) < most:
            if temperature > 0:
                token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
            else:
                token = int(logits.argmax())
            probabilities.append(float(logits.softmax(-1)[token]))
            if token == Tokenizer.boundary:
                return Generated(tokens, probabilities, True)
            tokens.append(token)
            logits = reader.read([token])[-1]
    return Generated(tokens, probabilities, False)


def incremental_difference(
    model: Decoder, client: attnd.Client, attention: Attention, document: Sequence[int], prefill: int
) -> float:
    """The largest difference of a logit between one pass over a document and reading it into a session.

    Args:
        prefill: tokens that are read at once; then they come one by one.
    """
    tokens = list(document[: model.config.context])
    if not 1 <= prefill < len(tokens):
        raise ValueError(f"a prefill of {prefill} leaves nothing of {len(tokens)} tokens, or is nothing")
    with torch.no_grad():
        whole = model(torch.tensor([tokens]), attention)[0]
    with Reader(model, client) as reader:
        parts = [reader.read(tokens[:prefill])] + [reader.read([token]) for token in tokens[prefill:]]
    return float((torch.cat(parts) - whole).abs().max())
