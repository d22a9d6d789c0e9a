"""The results as JSON, and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import Any

from .evaluate import Score, by_kind, score
from .experiment import Material, Options, Result


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and the standard deviation where there are several."""
    text = f"{mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {stdev(values):.{digits}f}"


def table(head: Sequence[str], body: Sequence[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(map(str, line))} |" for line in lines] + [""]


def baseline_scores(material: Material) -> dict[str, Score]:
    return {name: score(losses, material.parts.heldout) for name, losses in material.losses.items()}


def as_json(options: Options, material: Material, results: Sequence[Result]) -> dict[str, Any]:
    """Everything that the page says, and the losses of every step."""
    parts = material.parts
    return {
        "options": dataclasses.asdict(options),
        "documents": {name: len(getattr(parts, name)) for name in ("train", "validation", "heldout")},
        "removed": parts.removed,
        "closest": {"median": median(material.closest), "max": max(material.closest)},
        "vocabulary": material.tokenizer.size,
        "unseen": dataclasses.asdict(material.unseen),
        "baselines": {
            name: {**dataclasses.asdict(found), **material.chosen[name]}
            for name, found in baseline_scores(material).items()
        },
        "grammar": dataclasses.asdict(material.grammar),
        "decoder": [dataclasses.asdict(result) for result in results],
    }


def as_page(options: Options, material: Material, results: Sequence[Result], attention: str) -> str:
    sections = (
        heading(options, results, attention),
        corpus_part(material),
        loss_part(material, results),
        kinds_part(material, results),
        control_part(results),
        answers_part(results),
        samples_part(results),
    )
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def heading(options: Options, results: Sequence[Result], attention: str) -> list[str]:
    seeds = ", ".join(str(result.seed) for result in results)
    return [
        "# Results",
        "",
        f"{options.layers} layers, width {options.width}, {options.heads} heads, context {options.context}; "
        f"{options.schedule.steps} steps of {options.schedule.rows} documents; seeds {seeds}; "
        f"attention of training and scoring: {attention}.",
        "",
        "![Loss of training](loss.png)",
        "",
    ]


def corpus_part(material: Material) -> list[str]:
    parts, unseen, closest = material.parts, material.unseen, material.closest
    body: list[list[object]] = [["train", len(parts.train), "", "", "", sum(map(len, material.train))]]
    for name, tokens in (("validation", material.validation), ("heldout", material.heldout)):
        removed = parts.removed[name]
        kept = len(getattr(parts, name))
        body.append([name, kept, removed["exact"], removed["normalised"], removed["near"], sum(map(len, tokens))])
    return [
        "## Parts",
        "",
        *table(["part", "documents", "removed: exact", "normalised", "near duplicates", "tokens"], body),
        f"A held-out document's similarity to the training document most like it: median {median(closest):.2f}, "
        f"largest {max(closest):.2f}. Vocabulary {material.tokenizer.size}. Never seen in the training part: "
        f"{unseen.tokens} of {unseen.of_tokens} held-out tokens, {unseen.words} of {unseen.of_words} words.",
        "",
    ]


def figures(scores: Sequence[Score]) -> list[str]:
    return [
        spread([one.nats_per_token for one in scores]),
        spread([one.perplexity for one in scores], 2),
        spread([one.bits_per_byte for one in scores]),
    ]


def loss_part(material: Material, results: Sequence[Result]) -> list[str]:
    body = []
    for name, one in baseline_scores(material).items():
        low = min(result.advantage[name][0] for result in results)
        high = max(result.advantage[name][1] for result in results)
        body.append([name, *figures([one]), f"{low:.3f} to {high:.3f}"])
    ours = [result.score for result in results]
    body.append(["**decoder**", *figures(ours), ""])
    body.append(["the grammar itself", *figures([material.grammar]), ""])
    train = spread([result.train_score.nats_per_token for result in results])
    return [
        f"## Held-out loss: {ours[0].tokens} tokens, the same for every model",
        "",
        *table(["model", "nats per token", "perplexity", "bits per byte", "worse than the decoder by"], body),
        "±: standard deviation over seeds. Last column: nats per token, the hull of the seeds' 95 % intervals "
        f"(bootstrap over documents). On as many training documents the decoder has {train} nats per token.",
        "",
    ]


def kinds_part(material: Material, results: Sequence[Result]) -> list[str]:
    documents = material.parts.heldout
    known = {name: by_kind(losses, documents) for name, losses in material.losses.items() if name != "uniform"}
    costs: dict[str, list[float]] = {}
    for document, tokens in zip(documents, material.heldout, strict=True):
        cost = costs.setdefault(document.kind, [0.0, 0.0])
        cost[0] += document.nats
        cost[1] += len(tokens) - 1
    body: list[list[object]] = [
        [
            kind,
            *(f"{losses[kind]:.3f}" for losses in known.values()),
            spread([result.kinds[kind] for result in results]),
            f"{nats / tokens:.3f}",
        ]
        for kind, (nats, tokens) in sorted(costs.items())
    ]
    return ["## By kind of document (nats per token)", "", *table(["kind", *known, "decoder", "grammar"], body)]


def control_part(results: Sequence[Result]) -> list[str]:
    shuffles = [result.shuffle for result in results]
    futures = [result.future for result in results]
    ordered, shuffled = (spread([getattr(one, order) for one in shuffles]) for order in ("ordered", "shuffled"))
    body = [
        ["context in order", f"{ordered} nats per token, {shuffles[0].targets} targets"],
        ["context shuffled, but for its last token", f"{shuffled} nats per token"],
        ["a bigram, with either", f"{shuffles[0].bigram:.3f} nats per token"],
        ["future tokens changed: earlier logits change by", largest(futures, "earlier")],
        ["... later logits change by", largest(futures, "later")],
        ["gradient of an earlier loss by future embeddings", largest(futures, "earlier_gradient")],
        ["... by its own", largest(futures, "own_gradient")],
        ["logits through a session, token by token, differ by", largest(results, "incremental")],
    ]
    agreements = [result.agreement for result in results]
    for what, field, size in (
        ("logits", "logits", "largest_logit"),
        ("gradients of all weights", "gradient", "largest_gradient"),
    ):
        difference, of = largest(agreements, field), largest(agreements, size)
        body.append([f"{what} with attnd's and torch's attention differ by", f"{difference}, the largest being {of}"])
    return [
        "## Controls",
        "",
        *table(["control", "result"], body),
        "Changes and differences are the largest of all seeds and values.",
        "",
    ]


def largest(found: Sequence[object], name: str) -> str:
    value = max(getattr(one, name) for one in found)
    return "0" if value == 0 else f"{value:.1e}"


def answers_part(results: Sequence[Result]) -> list[str]:
    """Per kind the right ones, and the wrong ones that the decoders were surest of."""
    everything = [answer for result in results for answer in result.answers]
    body, shown = [], []
    for kind in sorted({answer.question.kind for answer in everything}):
        of_kind = [answer for answer in everything if answer.question.kind == kind]
        wrong = sorted((one for one in of_kind if not one.right), key=lambda one: -one.probability)
        right = [one.probability for one in of_kind if one.right]
        body.append(
            [
                kind,
                len(of_kind),
                len(right),
                sum(one.probability > 0.5 for one in wrong),
                f"{mean(right):.2f}" if right else "",
                f"{mean(one.probability for one in wrong):.2f}" if wrong else "",
            ]
        )
        shown += wrong[:3]
    head = ["kind", "asked", "right", "wrong with p > 0.5", "mean p of a right answer", "of a wrong one"]
    return [
        "## Probable and true: greedy answers, where the truth follows from the document (all seeds)",
        "",
        *table(head, body),
        *(
            f"- {one.question.text.replace(chr(10), ' ')} **{one.text or '(nothing)'}** (p = {one.probability:.2f}; "
            f"true: {one.question.truth})"
            for one in shown
        ),
        "",
    ]


def samples_part(results: Sequence[Result]) -> list[str]:
    lines = ["## Documents of their own, generated through a session", ""]
    for result in results:
        lines += ["```", result.sample, "```", ""]
    return lines
