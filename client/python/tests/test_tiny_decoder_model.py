"""The tiny decoder's rows, losses, controls and generation, with untrained weights."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch
from tiny_decoder import baselines, batches, controls, evaluate, questions
from tiny_decoder.attention import LocalAttention, RemoteAttention
from tiny_decoder.data import Document
from tiny_decoder.generate import Reader, generate, incremental_difference
from tiny_decoder.model import Config, Decoder
from tiny_decoder.tokenizer import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import attnd

torch.set_num_threads(1)

CONFIG = Config(vocabulary=20, context=16, layers=2, width=24, heads=3)


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(5)
    decoder = Decoder(CONFIG)
    with torch.no_grad():
        # Far from zero, so that attention has something to choose and greedy tokens differ.
        for parameter in decoder.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return decoder


def random_documents(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [[0, *torch.randint(1, 20, (length,), generator=generator).tolist(), 0] for length in lengths]


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_each_token_is_predicted_once_with_enough_before_it() -> None:
    documents = [list(range(100, 100 + length)) for length in range(2, 60)]
    found: Counter[tuple[int, int]] = Counter()
    for row in batches.rows(documents, 8):
        assert len(row.inputs) == len(row.targets) <= 8
        for place, target in enumerate(row.targets):
            if target != batches.IGNORED:
                assert target == row.inputs[place] + 1
                assert place >= 4 - 1 or row.inputs[0] == 100
                found[row.document, target] += 1
    assert found == {(number, token): 1 for number, document in enumerate(documents) for token in document[1:]}


def test_an_epoch_has_each_row_once() -> None:
    rows = batches.rows(random_documents(12, longest=10), 16)
    drawn = [row.document for chosen in batches.shuffled(rows, 4, 6, seed=1) for row in chosen]
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12))
    assert drawn[:12] != drawn[12:]
    assert drawn == [row.document for chosen in batches.shuffled(rows, 4, 6, seed=1) for row in chosen]


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_losses_do_not_depend_on_batches_and_padding(model: Decoder) -> None:
    documents = random_documents(10, longest=15)
    losses = evaluate.decoder_losses(model, LocalAttention(), documents)
    for document, values in zip(documents, losses, strict=True):
        logits = model(torch.tensor([document[:-1]]), LocalAttention())[0].log_softmax(-1)
        expected = [-logits[place, token].item() for place, token in enumerate(document[1:])]
        assert values == pytest.approx(expected, abs=1e-4)


def test_long_documents_are_scored_completely(model: Decoder) -> None:
    documents = random_documents(10, longest=70)
    losses = evaluate.decoder_losses(model, LocalAttention(), documents)
    assert [len(values) for values in losses] == [len(document) - 1 for document in documents]


def test_scores_by_hand() -> None:
    documents = [Document(0, "x", "abé", 0.0), Document(1, "y", "abcd", 0.0)]  # 4 + 4 bytes
    losses = [[1.0, 2.0], [3.0, 4.0, 0.0]]
    found = evaluate.score(losses, documents)
    assert (found.tokens, found.nats_per_token, found.perplexity) == (5, 2.0, pytest.approx(math.e**2))
    assert found.bits_per_byte == pytest.approx(10 / math.log(2) / 8)
    assert evaluate.by_kind(losses, documents) == {"x": 1.5, "y": pytest.approx(7 / 3)}
    higher = [[value + 0.25 for value in values] for values in losses]
    assert evaluate.advantage(losses, higher, 0) == pytest.approx((0.25, 0.25))
    with pytest.raises(ValueError, match="other tokens"):
        evaluate.advantage(losses, [[1.0], [2.0]], 0)


# ---- controls --------------------------------------------------------------------------------------------------------


def leaking(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sees the future."""
    return scaled_dot_product_attention(query, key, value)


def blind(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sees nothing."""
    return torch.zeros_like(value)


def test_the_future_control_finds_a_leak(model: Decoder) -> None:
    documents = random_documents(20)
    honest = controls.future_control(model, LocalAttention(), documents, 0, place=8)
    assert (honest.earlier, honest.earlier_gradient) == (0, 0)
    assert honest.later > 0.1
    assert honest.own_gradient > 0
    leak = controls.future_control(model, leaking, documents, 0, place=8)
    assert leak.earlier > 0.1
    assert leak.earlier_gradient > 0


def test_attnd_does_not_leak(model: Decoder, client: attnd.Client) -> None:
    found = controls.future_control(model, RemoteAttention(client), random_documents(20), 0, place=8)
    assert (found.earlier, found.earlier_gradient) == (0, 0)
    assert found.later > 0.1
    assert found.own_gradient > 0


def test_attnd_gives_torchs_logits_and_gradients(model: Decoder, client: attnd.Client) -> None:
    rows = batches.rows(random_documents(20, longest=15), CONFIG.context)
    found = controls.agreement(model, RemoteAttention(client), LocalAttention(), rows)
    assert found.logits <= 1e-5 * found.largest_logit
    assert found.gradient <= 1e-5 * found.largest_gradient
    other = controls.agreement(model, leaking, LocalAttention(), rows)
    assert other.gradient > 1e-2 * other.largest_gradient


def test_shuffling_keeps_what_a_bigram_sees(model: Decoder) -> None:
    documents = random_documents(30)
    targets = controls.targets(documents, CONFIG.context, 3, seed=2)
    assert len(targets) > 30
    assert any(target.context != target.shuffled for target in targets)
    for target in targets:
        assert sorted(target.context) == sorted(target.shuffled)
        assert (target.shuffled[0], target.shuffled[-1]) == (0, target.context[-1])
        assert len(target.context) <= CONFIG.context
    bigram = baselines.Ngram(documents, 2, 0.5, baselines.Uniform(20))
    sees_order = controls.shuffle_control(model, LocalAttention(), bigram, documents, 2)
    assert sees_order.ordered != pytest.approx(sees_order.shuffled, rel=1e-3)
    sees_last = controls.shuffle_control(model, blind, bigram, documents, 2)
    assert sees_last.ordered == pytest.approx(sees_last.shuffled, rel=1e-6)


# ---- generation ------------------------------------------------------------------------------------------------------


def test_tokens_through_a_session_are_those_of_whole_passes(model: Decoder, client: attnd.Client) -> None:
    prompt = [0, 3, 7]
    generated = generate(model, client, prompt, 10)
    expected = list(prompt)
    while len(expected) < len(prompt) + 10:
        probabilities = model(torch.tensor([expected]), LocalAttention())[0, -1].softmax(-1)
        token = int(probabilities.argmax())
        if token == 0:
            break
        expected.append(token)
        assert generated.probabilities[len(expected) - 4] == pytest.approx(probabilities[token].item(), rel=1e-4)
    assert generated.tokens == expected[3:]
    assert len(generated.tokens) > 3
    assert generated.ended == (len(generated.tokens) < 10)
    assert client.server_info().sessions_active == 0


def test_sampling_is_its_seeds_and_stops_at_the_context(model: Decoder, client: attnd.Client) -> None:
    one, same, other = (generate(model, client, [0], 100, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert max(len(one.tokens), len(other.tokens)) <= CONFIG.context - 1


@pytest.mark.parametrize("prefill", [1, 5, 13])
def test_reading_in_pieces_gives_the_logits_of_one_pass(model: Decoder, client: attnd.Client, prefill: int) -> None:
    document = random_documents(1, longest=14)[0] + [4] * 14
    for attention in (LocalAttention(), RemoteAttention(client)):
        assert incremental_difference(model, client, attention, document, prefill) <= 1e-4
    assert incremental_difference(model, client, leaking, document, prefill) > 1e-2


def test_a_reader_refuses_what_does_not_fit(model: Decoder, client: attnd.Client) -> None:
    with Reader(model, client) as reader, pytest.raises(ValueError, match="17 tokens do not fit a context of 16"):
        reader.read([1] * 17)
    with pytest.raises(ValueError, match="prefill of 2"):
        incremental_difference(model, client, LocalAttention(), [0, 1], 2)


def test_questions_are_worked_out() -> None:
    documents = [
        Document(0, "sums", "12 plus 9 is 21. 21 minus 4 is 16.", 0.0),
        Document(1, "story", "Ada and Bo live in a town. Bo has a red hat. Now Ada has the red hat.", 0.0),
        Document(2, "story", "Bo has a red hat. Bo gives the red hat to Ada. Now Cy has the red hat.", 0.0),
        Document(3, "letter", "Dear Ada, no question.", 0.0),
    ]
    assert [(one.kind, one.text.split(". ")[-1], one.truth, one.end) for one in questions.questions(documents)] == [
        ("sums", "21 minus 4 is", "17", "."),
        ("story", "Now", "Bo", " has"),
        ("story", "Now", "Ada", " has"),
    ]


def test_an_answer_ends_where_the_text_goes_on(client: attnd.Client) -> None:
    """A decoder that has learned one document by heart gives its answer, and hardly any doubt."""
    text = "12 plus 9 is 21. 21 minus 4 is 17."
    tokenizer = Tokenizer([text], 257)
    torch.manual_seed(0)
    model = Decoder(Config(vocabulary=tokenizer.size, context=48, layers=1, width=32, heads=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs, targets = batches.batch(batches.rows([tokenizer.document(text)], 48))
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(inputs, LocalAttention()).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    (known,) = questions.ask(model, client, tokenizer, [Document(0, "sums", text, 0.0)])
    assert (known.text, known.right) == ("17", True)
    assert known.probability > 0.5
    (wrong,) = questions.ask(model, client, tokenizer, [Document(0, "sums", text.replace("4", "5"), 0.0)])
    assert wrong.question.truth == "16"
    assert not wrong.right
    assert questions.ask(model, client, tokenizer, [Document(0, "sums", "1 plus 1 is 2. " * 5, 0.0)]) == []


def test_a_config_needs_heads_that_divide() -> None:
    with pytest.raises(ValueError, match="width of 24 cannot be divided among 5 heads"):
        dataclasses.replace(CONFIG, heads=5)
