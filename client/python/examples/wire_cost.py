#!/usr/bin/env python3
"""What attention in attnd costs on the wire: bytes and round trips per token, counted, and tokens per second.

    attnd &
    pip install './client/python[transformers]'
    client/python/examples/wire_cost.py --server 127.0.0.1:50051

SmolLM2-135M, the whole model, and the attention of Llama 3 8B alone (32 layers, 32 query and 8 kv heads of 128, bf16).
Weights, and the latter's Q, K and V, are random, which changes neither bytes nor speed. Each reads a prompt and then
tokens one by one, with transformers' own cache and attention and with a RemoteCache, in turns, so that what else the
machine does slows both; times are medians. Exit status 0 only when the results agree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Between two layers torch's threads would otherwise spin on the cores that a server on this machine computes with.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnd
from attnd.transformers import RemoteCache


@dataclass(frozen=True)
class Shape:
    """A model's attention, and how wide the rest of it is.

    Attributes:
        dtype: of Q, K and V on the wire and of the model.
        kv_dtype: of K and V in the server.
        difference: the most that a local and a remote result may differ, relative to the largest number in them.
        whole: run all of the model; otherwise its attention only.
    """

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: str
    difference: float
    whole: bool
    hidden: int = 64
    intermediate: int = 64
    vocabulary: int = 128

    def sent_per_token(self) -> int:
        """Bytes of Q, K and V."""
        return self.layers * (self.q_heads + 2 * self.kv_heads) * self.head_dim * self.dtype.itemsize

    def received_per_token(self) -> int:
        """Bytes of the attention's output."""
        return self.layers * self.q_heads * self.head_dim * self.dtype.itemsize

    def cache_per_token(self) -> int:
        """Bytes of K and V that stay in the server, where they have the wire's dtype."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def model(self) -> Any:
        config = transformers.LlamaConfig(
            num_hidden_layers=self.layers,
            num_attention_heads=self.q_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=1 << 20,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).to(self.dtype).eval()


SHAPES = (
    Shape(
        "SmolLM2-135M", 30, 9, 3, 64, torch.float32, "f32", 1e-4, True, hidden=576, intermediate=1536, vocabulary=49152
    ),
    Shape("Llama 3 8B's attention", 32, 32, 8, 128, torch.bfloat16, "bf16", 2e-2, False),
)


class RoundTrip(NamedTuple):
    """One step: bytes of its messages as protobuf serializes them, without HTTP/2's frames around them.

    Attributes:
        seconds: until the answer was there.
        attention_seconds: of them, those that the server computed.
    """

    sent: int
    received: int
    seconds: float
    attention_seconds: float


class CountingClient(attnd.Client):
    """Keeps account of its steps."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.round_trips: list[RoundTrip] = []

    def send_step(self, request: Any, timeout: float | None = None) -> Any:
        start = time.perf_counter()
        answer = super().send_step(request, timeout)
        seconds = time.perf_counter() - start
        trip = RoundTrip(request.ByteSize(), answer.ByteSize(), seconds, answer.timing.compute_ns * 1e-9)
        self.round_trips.append(trip)
        return answer


# Tokens ``first`` to ``last`` through a cache: the numbers that come out for the last of them.
Forward = Callable[[int, int, Any], torch.Tensor]


def whole_model(model: Any, total: int) -> Forward:
    ids = torch.randint(1, model.config.vocab_size, (1, total))
    return lambda first, last, cache: model(ids[:, first:last], cache=cache, logits_to_keep=1).logits[0, -1]


def attention_only(model: Any, shape: Shape, total: int) -> Forward:
    """Random Q, K and V in place of what the model's other parts would make of its tokens."""
    q, k, v = (
        torch.randn(1, heads, total, shape.head_dim).to(shape.dtype)
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    )

    def forward(first: int, last: int, cache: Any) -> torch.Tensor:
        embeddings = torch.empty(1, last - first, model.config.hidden_size, dtype=shape.dtype)
        mask = create_causal_mask(model.config, embeddings, None, cache)
        attention = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        outputs = []
        for index, layer in enumerate(model.model.layers):
            new = [tensor[:, :, first:last] for tensor in (q, k, v)]
            keys, values = cache.update(*new[1:], index)
            module = layer.self_attn
            outputs.append(attention(module, new[0], keys, values, mask, scaling=module.scaling)[0][0, -1].flatten())
        return torch.cat(outputs)

    return forward


class Reader:
    """Reads tokens through a cache.

    Attributes:
        results, seconds: of the prompt, then of each token.
    """

    def __init__(self, forward: Forward, cache: Any) -> None:
        self._forward = forward
        self._cache = cache
        self.results: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def read(self, first: int, last: int) -> None:
        start = time.perf_counter()
        self.results.append(self._forward(first, last, self._cache))
        self.seconds.append(time.perf_counter() - start)

    def token_seconds(self) -> float:
        return statistics.median(self.seconds[1:])


@dataclass(frozen=True)
class Measurement:
    """Attributes:
    prompt, tokens: the round trips of the prompt, and of all tokens after it.
    """

    local: Reader
    remote: Reader
    prompt: list[RoundTrip]
    tokens: list[RoundTrip]

    def difference(self) -> float:
        """The largest between two results, relative to the largest number in them."""
        local, remote = (torch.stack(reader.results).float() for reader in (self.local, self.remote))
        return float((local - remote).abs().max() / local.abs().max())


@torch.no_grad()
def measure(shape: Shape, client: CountingClient, prompt: int, tokens: int) -> Measurement:
    """The prompt at once, the tokens one by one."""

    def forward(model: Any) -> Forward:
        torch.manual_seed(1)  # the same tokens for both
        total = prompt + tokens
        return whole_model(model, total) if shape.whole else attention_only(model, shape, total)

    # Two models, because a RemoteCache takes its model's attention over.
    model, other = shape.model(), shape.model()
    with RemoteCache(other, client, kv_dtype=shape.kv_dtype) as cache:
        local = Reader(forward(model), transformers.DynamicCache(config=model.config))
        remote = Reader(forward(other), cache)
        counts = []
        for first, last in [(0, prompt), *((n, n + 1) for n in range(prompt, prompt + tokens))]:
            local.read(first, last)
            remote.read(first, last)
            counts.append(len(client.round_trips))
    trips, client.round_trips = client.round_trips, []
    return Measurement(local, remote, trips[: counts[0]], trips[counts[0] :])


def report(shape: Shape, prompt: int, tokens: int, measured: Measurement) -> list[str]:
    """Rows of a Markdown table."""
    kib, mib = 1 << 10, 1 << 20
    one = measured.tokens
    sent, received = (sum(trip[field] for trip in one) / tokens for field in (0, 1))
    prompt_sent, prompt_received = (sum(trip[field] for trip in measured.prompt) for field in (0, 1))
    attention = statistics.median(trip.attention_seconds for trip in one)
    other = statistics.median(trip.seconds - trip.attention_seconds for trip in one)
    local, remote = measured.local, measured.remote
    rows = {
        "layers; query and kv heads; head_dim; dtype": (
            f"{shape.layers}; {shape.q_heads} and {shape.kv_heads}; {shape.head_dim}; "
            f"{str(shape.dtype).removeprefix('torch.')}"
        ),
        "round trips per token": f"{len(one) / tokens:g}",
        "sent per token: counted, arithmetic": f"{sent / kib:.1f} KiB, {shape.sent_per_token() / kib:.1f} KiB",
        "received per token: counted, arithmetic": (
            f"{received / kib:.1f} KiB, {shape.received_per_token() / kib:.1f} KiB"
        ),
        f"K and V of {prompt} tokens, which stay where they are": f"{prompt * shape.cache_per_token() / mib:.1f} MiB",
        "one round trip: attention, everything else": f"{attention * 1e6:.0f} us, {other * 1e6:.0f} us",
        "tokens/s: local, attnd": f"{1 / local.token_seconds():.1f}, {1 / remote.token_seconds():.1f}",
        f"prompt of {prompt}: round trips": f"{len(measured.prompt)}",
        f"prompt of {prompt}: sent, received": f"{prompt_sent / mib:.1f} MiB, {prompt_received / mib:.1f} MiB",
        f"prompt of {prompt}: local, attnd": f"{local.seconds[0]:.2f} s, {remote.seconds[0]:.2f} s",
        "largest difference of the results, relative": f"{measured.difference():.1e}",
    }
    return [f"| {what} | {value} |" for what, value in rows.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens that come at once")
    parser.add_argument("--tokens", type=int, default=64, help="that come one by one")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    agree = True
    with CountingClient(options.server) as client:
        try:
            info = client.server_info()
        except attnd.AttndError as error:
            print(f"no attnd at {options.server}: {error}", file=sys.stderr)
            return 1
        print(f"attnd {info.version} at {options.server}: {info.isa}, {info.compute_threads} compute threads")
        print(f"torch {torch.__version__}, {options.threads} threads; transformers {transformers.__version__}")
        for shape in SHAPES:
            print(f"\nReading {options.prompt} and {options.tokens} tokens with {shape.name} ...", flush=True)
            measured = measure(shape, client, options.prompt, options.tokens)
            print(f"\n| {shape.name} | |\n| --- | --- |")
            print("\n".join(report(shape, options.prompt, options.tokens, measured)), flush=True)
            agree = agree and measured.difference() <= shape.difference
    if not agree:
        print("the results differ by more than rounding", file=sys.stderr)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
