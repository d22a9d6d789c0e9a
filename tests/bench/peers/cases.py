"""What is compared: attention layers of known models, decoding and prefilling, and their tensors."""

import dataclasses
import typing

import numpy as np

import protocol

FROM_MEMORY_BYTES = 1 << 30  # of layers in turn, on every side: no cache holds them until their next turn
IN_CACHE_BYTES = 48 << 20  # a layer that is larger is not measured as cached

MODELS = {  # query heads, kv heads, head_dim
    "llama3-8b": (32, 8, 128),
    "qwen2-7b": (28, 4, 128),
    "gpt2": (12, 12, 64),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A case and how it is called in the table."""

    model: str
    phase: str  # decode or prefill
    place: str  # where K and V are when a timed call begins: memory or cache
    case: protocol.Case

    @property
    def name(self) -> str:
        c = self.case
        size = f"N={c.tokens}" if self.phase == "prefill" else f"T={c.tokens}"
        batch = f" B={c.batch}" if c.batch > 1 else ""
        place = f" {self.place}" if self.phase == "decode" else ""
        return f"{self.model} {self.phase} {size}{batch}{place}"


def _subject(model: str, phase: str, place: str, batch: int, tokens: int, dtype: str) -> Subject:
    queries = tokens if phase == "prefill" else 1
    one = protocol.Case(*MODELS[model], batch, tokens, queries, dtype, layers=1)
    layers = max(2, -(-FROM_MEMORY_BYTES // one.layer_bytes)) if place == "memory" else 1
    return Subject(model, phase, place, one._replace(layers=layers))


def subjects() -> typing.Iterator[Subject]:
    decodes = [
        ("llama3-8b", 1, (1024, 4096, 32768)),
        ("qwen2-7b", 1, (4096,)),
        ("gpt2", 1, (1024,)),
        ("llama3-8b", 8, (1024, 4096)),
        ("qwen2-7b", 8, (4096,)),
        ("gpt2", 8, (1024,)),
    ]
    for model, batch, lengths in decodes:
        for tokens in lengths:
            for place in ("memory", "cache"):
                for dtype in ("f32", "bf16"):
                    subject = _subject(model, "decode", place, batch, tokens, dtype)
                    if place == "memory" or (batch == 1 and subject.case.layer_bytes <= IN_CACHE_BYTES):
                        yield subject
    # A prefill multiplies far longer than it reads: one layer.
    for tokens in (512, 2048):
        for dtype in ("f32", "bf16"):
            yield _subject("llama3-8b", "prefill", "cache", 1, tokens, dtype)


class Tensors(typing.NamedTuple):
    q: np.ndarray  # [batch, queries, q_heads, head_dim]
    k: np.ndarray  # [batch, tokens, kv_heads, head_dim]
    v: np.ndarray


def random_tensors(case: protocol.Case) -> Tensors:
    """Numbers that f32, bf16 and f16 all hold exactly, so that every side computes from the same ones."""
    random = np.random.default_rng(1)

    def normal(tokens: int, heads: int) -> np.ndarray:
        x = random.standard_normal((case.batch, tokens, heads, case.head_dim), np.float32)
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
        x[np.abs(x) < 2.0**-7] = 0  # below 2^-14 f16 has fewer bits than bf16
        return x

    return Tensors(
        normal(case.queries, case.q_heads), normal(case.tokens, case.kv_heads), normal(case.tokens, case.kv_heads)
    )


def reference_error(case: protocol.Case, tensors: Tensors, out: np.ndarray, rows: int = 32) -> float:
    """Largest relative error of some rows against the definition in float64."""
    random = np.random.default_rng(2)
    worst = 0.0
    for _ in range(rows):
        b, i, h = (int(random.integers(n)) for n in (case.batch, case.queries, case.q_heads))
        visible = case.tokens - case.queries + i + 1
        k = tensors.k[b, :visible, h // case.group].astype(np.float64)
        v = tensors.v[b, :visible, h // case.group].astype(np.float64)
        scores = k @ tensors.q[b, i, h].astype(np.float64) * case.head_dim**-0.5
        weights = np.exp(scores - scores.max())
        expected = weights @ v / weights.sum()
        worst = max(worst, float(np.linalg.norm(out[b, i, h] - expected) / np.linalg.norm(expected)))
    return worst


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Largest over rows of ||a - b|| / ||b||."""
    return float(np.max(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)))
