"""The tiny decoder's corpus, split, tokenizer and baselines, on numbers worked out by hand."""

from __future__ import annotations

import math
import re

import pytest
from tiny_decoder import baselines, data, split, tokenizer
from tiny_decoder.data import Document
from tiny_decoder.tokenizer import Tokenizer

CLOSING = {"(": ")", "[": "]", "{": "}"}


def documents(*texts: str) -> list[Document]:
    return [Document(number, "by hand", text, 0.0) for number, text in enumerate(texts)]


# ---- corpus ----------------------------------------------------------------------------------------------------------


def test_a_corpus_is_its_seeds() -> None:
    assert data.corpus(200, 7) == data.corpus(200, 7)
    assert [one.text for one in data.corpus(200, 7)] != [one.text for one in data.corpus(200, 8)]
    assert {one.kind for one in data.corpus(200, 7)} == set(data.RULES)


def test_choices_cost_what_they_rule_out() -> None:
    choices = data.Choices(0)
    choices.pick("abcd")
    assert choices.nats == pytest.approx(math.log(4))
    choices.nats = 0
    choices.distinct("abcd", 2)
    assert choices.nats == pytest.approx(math.log(4 * 3))
    choices.nats = 0
    choices.pick("aaa")
    assert choices.nats == 0
    for _ in range(20):
        choices.nats = 0
        happens = choices.chance(0.25)
        assert choices.nats == pytest.approx(-math.log(0.25 if happens else 0.75))


@pytest.mark.parametrize("seed", range(50))
def test_what_documents_say_follows_from_what_they_said(seed: int) -> None:
    choices = data.Choices(seed)

    for left, sign, right, result in re.findall(r"(\d+) (plus|minus) (\d+) is (\d+)\.", data.sums(choices)):
        assert int(result) == int(left) + (1 if sign == "plus" else -1) * int(right)

    open_ones: list[str] = []
    for mark in data.brackets(choices):
        if mark in CLOSING:
            open_ones.append(mark)
        elif mark in CLOSING.values():
            assert CLOSING[open_ones.pop()] == mark
    assert not open_ones

    story = data.story(choices)
    holder = re.search(r"(\w+) has a", story)[1]
    for giver, receiver in re.findall(r"(\w+) (?:gives|sells|lends) the \w+ \w+ to (\w+)\.", story):
        assert giver == holder
        holder = receiver
    assert f"Now {holder} has" in story

    for sentence in data.agreement(choices).removesuffix(".").split(". "):
        found = sentence.split(" ")
        assert found[2].endswith("s") != found[-1].endswith("s"), sentence

    first, order, again = re.fullmatch(
        r"\w+ buys (.*)\. From the (last|first) .*: (.*)\.", data.packing(choices)
    ).groups()
    assert again.split(", ") == first.split(", ")[:: -1 if order == "last" else 1]


# ---- split -----------------------------------------------------------------------------------------------------------


def test_similarity_is_of_runs_of_four_words() -> None:
    one, other = split.shingles("a b c d e"), split.shingles("A  b c d, f")
    assert one == {("a", "b", "c", "d"), ("b", "c", "d", "e")}
    assert other == {("a", "b", "c", "d"), ("b", "c", "d", ","), ("c", "d", ",", "f")}
    assert split.similarity(one, other) == 1 / 4
    assert split.shingles("a b") == {("a", "b")}


def test_duplicates_are_told_apart() -> None:
    text = "The red hen near the gate sings. The red hen near the wall waits."
    known = split.Known(documents(text, "Something else altogether, and at some length."))
    (same, shouted, changed, other) = documents(
        text, text.upper().replace(". ", ".\n"), text.replace("waits", "sleeps"), "The red hen near the gate is blue."
    )
    assert known.reason(same) == "exact"
    assert known.reason(shouted) == "normalised"
    assert known.reason(changed) == "near"
    # Of 16 words there are 13 runs, two of them twice; two of the 11 end in the word that was changed.
    assert known.nearest(changed) == (text, 9 / (11 + 2))
    assert known.reason(other) is None


def test_a_split_keeps_nothing_that_resembles_another_part() -> None:
    corpus = data.corpus(1200, 3)
    found = split.split(corpus, 4)
    assert len(found.train) == 960
    for part in ("validation", "heldout"):
        assert len(getattr(found, part)) + sum(found.removed[part].values()) == 120
    for reason in ("exact", "normalised", "near"):
        assert found.removed["validation"][reason] + found.removed["heldout"][reason] > 0, reason

    # All pairs, without the index that the split uses.
    pieces = {one.number: split.shingles(one.text) for one in corpus}
    earlier = list(found.train)
    for part in (found.validation, found.heldout):
        for one in part:
            assert all(split.similarity(pieces[one.number], pieces[other.number]) < split.NEAR for other in earlier)
            earlier.append(one)
    assert split.split(corpus, 4) == found
    assert split.split(corpus, 5).heldout != found.heldout


def test_a_corpus_of_one_text_has_nothing_to_hold_out() -> None:
    found = split.split(documents(*["the same text"] * 20), 0)
    assert (len(found.train), found.validation, found.heldout) == (16, (), ())
    assert found.removed == {part: {"exact": 2, "normalised": 0, "near": 0} for part in ("validation", "heldout")}


def test_parts_must_leave_something() -> None:
    with pytest.raises(ValueError, match=r"validation 0\.5, heldout 0\.5"):
        split.split(documents("a"), 0, validation=0.5, heldout=0.5)


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def test_the_most_frequent_pairs_become_tokens() -> None:
    # Four times "low", three of them after a space: "lo" or "ow", then "low", then " low".
    learned = Tokenizer(["low low low lower"] * 5, 257 + 3)
    assert learned.size == 260
    assert [learned.decode([token]) for token in learned.encode("low lower owl")] == [
        *("low", " low", "e", "r", " ", "o", "w", "l")
    ]


def test_every_text_can_be_written() -> None:
    learned = Tokenizer(["plain words"], 300)
    text = "Žluťoučký kůň 🦊\x00\n <document> Aé"
    assert learned.decode(learned.encode(text)) == text
    assert learned.boundary not in learned.encode(text)
    assert learned.document("a")[0] == learned.document("a")[-1] == learned.boundary
    assert learned.decode(learned.document(text)) == text
    with pytest.raises(ValueError, match="256"):
        Tokenizer(["a"], 256)


def test_what_training_never_showed_is_counted() -> None:
    learned = Tokenizer(["ab ab ab"], 257)
    found = tokenizer.unseen(learned, documents("ab ab ab"), documents("ab Ab zé"))
    # Bytes: a, b, space are known; A, z and the two of é are not. Words: only zé.
    assert (found.tokens, found.of_tokens, found.words, found.of_words) == (4, 9, 1, 3)


# ---- baselines -------------------------------------------------------------------------------------------------------

COUNTED = [[0, 1, 2, 0], [0, 1, 1, 0]]  # predicted: 1 three times, 0 twice, 2 once
VOCABULARY = 4


def unigram() -> baselines.Unigram:
    return baselines.Unigram(COUNTED, VOCABULARY, alpha=0.5)


def test_a_unigram_by_hand() -> None:
    assert [unigram().probability((0,), token) for token in range(4)] == [2.5 / 8, 3.5 / 8, 1.5 / 8, 0.5 / 8]


def test_a_bigram_by_hand() -> None:
    bigram = baselines.Ngram(COUNTED, 2, 0.5, unigram())
    # After 0 only 1 came, twice; after 1 came 2, 1 and 0, once each.
    assert bigram.probability((0,), 1) == pytest.approx(1.5 / 2 + 0.5 * 1 / 2 * 3.5 / 8)
    assert bigram.probability((0,), 3) == pytest.approx(0.5 * 1 / 2 * 0.5 / 8)
    assert bigram.probability((2, 1), 2) == pytest.approx(0.5 / 3 + 0.5 * 3 / 3 * 1.5 / 8)
    assert bigram.probability((3,), 1) == 3.5 / 8
    document = [0, 1, 3]
    assert baselines.nats(bigram, document) == pytest.approx(
        [-math.log(1.5 / 2 + 0.25 * 3.5 / 8), -math.log(0.5 * 0.5 / 8)]
    )


def test_a_trigram_by_hand() -> None:
    bigram = baselines.Ngram(COUNTED, 2, 0.5, unigram())
    trigram = baselines.Ngram(COUNTED, 3, 0.25, bigram)
    # After 0 1 came 2 and 1, once each; a document's first token has the boundary alone before it.
    assert trigram.probability((0, 1), 2) == pytest.approx(0.75 / 2 + 0.25 * 2 / 2 * bigram.probability((0, 1), 2))
    assert trigram.probability((0,), 1) == pytest.approx(1.75 / 2 + 0.25 * 1 / 2 * bigram.probability((0,), 1))


@pytest.mark.parametrize("history", [(0,), (0, 1), (0, 1, 1), (0, 3), (0, 2, 1)])
def test_probabilities_add_up(history: tuple[int, ...]) -> None:
    models, _ = baselines.fit(COUNTED, [[0, 1, 3, 0]], VOCABULARY)
    assert list(models) == ["uniform", "unigram", "bigram", "trigram"]
    for model in models.values():
        assert sum(model.probability(history, token) for token in range(VOCABULARY)) == pytest.approx(1)


def test_smoothing_is_chosen_on_the_validation_part() -> None:
    surprising, familiar = [[0, 3, 3, 0]], COUNTED
    _, chosen = baselines.fit(COUNTED, surprising, VOCABULARY)
    assert (chosen["unigram"]["alpha"], chosen["bigram"]["discount"]) == (1.0, 0.9)
    models, chosen = baselines.fit(COUNTED, familiar, VOCABULARY)
    assert (chosen["unigram"]["alpha"], chosen["bigram"]["discount"]) == (0.001, 0.1)
    assert chosen["bigram"]["validation loss"] == pytest.approx(baselines.loss(models["bigram"], familiar))
    assert baselines.loss(models["uniform"], familiar) == pytest.approx(math.log(VOCABULARY))
