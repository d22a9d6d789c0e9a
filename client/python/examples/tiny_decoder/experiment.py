"""All of it: the corpus and its parts, the baselines, and a decoder per seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import attnd

from . import baselines, evaluate
from .attention import Attention, LocalAttention, RemoteAttention
from .batches import rows
from .controls import FUTURE_PLACE, Agreement, FutureControl, ShuffleControl, agreement, future_control, shuffle_control
from .data import corpus
from .evaluate import Losses, Score
from .generate import generate, incremental_difference
from .model import Config, Decoder
from .questions import Answer, ask
from .split import Known, Split, split
from .tokenizer import Tokenizer, Unseen, unseen
from .train import History, Schedule, train


@dataclass(frozen=True)
class Options:
    """Attributes:
    documents: of the corpus.
    vocabulary: tokens, at most.
    corpus_seed, split_seed: the same for all seeds of the decoder, so that their losses can be compared.
    """

    documents: int = 4000
    vocabulary: int = 512
    corpus_seed: int = 2026
    split_seed: int = 11
    context: int = 128
    layers: int = 2
    width: int = 64
    heads: int = 4
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.context <= FUTURE_PLACE:
            raise ValueError(
                f"a context of {self.context} is too short for the controls; {FUTURE_PLACE + 1} are needed"
            )

    def config(self, tokenizer: Tokenizer) -> Config:
        return Config(tokenizer.size, self.context, self.layers, self.width, self.heads)


@dataclass(frozen=True)
class Material:
    """What all seeds share.

    Attributes:
        train, validation, heldout: tokens of the parts' documents.
        models: the baselines.
        chosen: what each was smoothed with, and its validation loss.
        losses: the baselines', held out.
        grammar: held out, at most what a reader needs who knows the grammar.
        closest: of each held-out document, its similarity to the training document that is most like it.
    """

    parts: Split
    tokenizer: Tokenizer
    train: list[list[int]]
    validation: list[list[int]]
    heldout: list[list[int]]
    unseen: Unseen
    models: dict[str, baselines.Baseline]
    chosen: dict[str, dict[str, float]]
    losses: dict[str, Losses]
    grammar: Score
    closest: list[float]


@dataclass(frozen=True)
class Result:
    """One seed's.

    Attributes:
        score: held out.
        train_score: of as many training documents.
        kinds: nats per token of each kind of document, held out.
        advantage: per baseline, by how many nats per token it is worse: a 95 % interval.
        incremental: the largest difference of a logit between one pass and reading through a session.
    """

    seed: int
    history: History
    score: Score
    train_score: Score
    kinds: dict[str, float]
    advantage: dict[str, tuple[float, float]]
    shuffle: ShuffleControl
    future: FutureControl
    agreement: Agreement
    incremental: float
    answers: list[Answer]
    sample: str


def prepare(options: Options) -> Material:
    """Splits first; whatever is learned or counted after that is of the training part."""
    parts = split(corpus(options.documents, options.corpus_seed), options.split_seed)
    tokenizer = Tokenizer((document.text for document in parts.train), options.vocabulary)
    train_tokens, validation, heldout = map(tokenizer.documents, (parts.train, parts.validation, parts.heldout))
    models, chosen = baselines.fit(train_tokens, validation, tokenizer.size)
    known = Known(parts.train)
    return Material(
        parts=parts,
        tokenizer=tokenizer,
        train=train_tokens,
        validation=validation,
        heldout=heldout,
        unseen=unseen(tokenizer, parts.train, parts.heldout),
        models=models,
        chosen=chosen,
        losses={name: [baselines.nats(model, document) for document in heldout] for name, model in models.items()},
        grammar=evaluate.total_score(
            math.fsum(document.nats for document in parts.heldout),
            sum(len(document) - 1 for document in heldout),
            parts.heldout,
        ),
        closest=[known.nearest(document)[1] for document in parts.heldout],
    )


def run_seed(
    material: Material,
    options: Options,
    client: attnd.Client,
    seed: int,
    attention: Attention | None = None,
    show_progress: bool = True,
) -> Result:
    """Trains a decoder and looks at it from all sides.

    Args:
        attention: of training and scoring; None: attnd's.
    """
    remote = RemoteAttention(client)
    attention = remote if attention is None else attention
    config = options.config(material.tokenizer)
    model, history = train(
        config, options.schedule, attention, material.train, material.validation, seed, show_progress
    )
    documents = material.parts.heldout
    losses = evaluate.decoder_losses(model, attention, material.heldout)
    seen = len(documents)
    train_losses = evaluate.decoder_losses(model, attention, material.train[:seen])
    whole = [row for row in rows(material.heldout, options.context) if row.inputs[0] == Tokenizer.boundary]
    return Result(
        seed=seed,
        history=history,
        score=evaluate.score(losses, documents),
        train_score=evaluate.score(train_losses, material.parts.train[:seen]),
        kinds=evaluate.by_kind(losses, documents),
        advantage={name: evaluate.advantage(losses, other, seed) for name, other in material.losses.items()},
        shuffle=shuffle_control(model, attention, material.models["bigram"], material.heldout, options.split_seed),
        future=future_control(model, attention, material.heldout[:16], seed),
        agreement=agreement(model, remote, LocalAttention(), whole[:16]),
        incremental=max(
            incremental_difference(model, client, attention, document, prefill=min(len(document), options.context) // 3)
            for document in material.heldout[:5]
        ),
        answers=ask(model, client, material.tokenizer, documents),
        sample=sample(model, client, material, seed),
    )


def sample(model: Decoder, client: attnd.Client, material: Material, seed: int) -> str:
    """A document of the decoder's own, from the boundary on."""
    generated = generate(model, client, [Tokenizer.boundary], model.config.context, temperature=0.8, seed=seed)
    return material.tokenizer.decode(generated.tokens) + ("" if generated.ended else " ...")
