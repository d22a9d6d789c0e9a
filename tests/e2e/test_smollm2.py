"""A real language model generates through attnd what it generates alone: SmolLM2-135M, 64 tokens of three prompts.

``ATTND_SMOLLM2_TOKENS=256`` makes it a longer run; -s shows tokens per second, and what was generated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import smollm2
import torch
from running_server import Server

import attnd
from attnd.transformers import RemoteCache

TOKENS = int(os.environ.get("ATTND_SMOLLM2_TOKENS", "64"))
LOGIT_DIFFERENCE = 1e-3

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--kv_cache_bytes=512MiB")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[attnd.Client]:
    with attnd.Client(server.target) as connected:
        yield connected


@pytest.fixture(scope="module")
def model_and_tokenizer() -> tuple[Any, Any]:
    return smollm2.load()


@pytest.fixture(scope="module")
def local(model_and_tokenizer: tuple[Any, Any]) -> list[Any]:
    model, tokenizer = model_and_tokenizer
    return [smollm2.generate(model, tokenizer, prompt, TOKENS, "local") for prompt in smollm2.PROMPTS]


def used_bytes(client: attnd.Client) -> int:
    return client.server_info().kv_cache_used_bytes


@pytest.mark.parametrize("number", range(len(smollm2.PROMPTS)))
def test_greedy_tokens_are_equal(
    client: attnd.Client, model_and_tokenizer: tuple[Any, Any], local: list[Any], number: int
) -> None:
    model, tokenizer = model_and_tokenizer
    with RemoteCache(model, client) as cache:
        remote = smollm2.generate(model, tokenizer, smollm2.PROMPTS[number], TOKENS, "attnd", cache=cache)
        assert used_bytes(client) > 0
    comparison = smollm2.compare(local[number], remote)
    print(
        f"{TOKENS} tokens of prompt {number + 1}: {TOKENS / local[number].seconds:.1f} tokens/s local, "
        f"{TOKENS / remote.seconds:.1f} with attnd; largest logit difference {comparison.difference:.2e}, smallest "
        f"margin of a chosen token {comparison.margin:.2e}"
    )
    print(smollm2.PROMPTS[number] + tokenizer.decode(remote.tokens))
    assert comparison.equal
    assert comparison.difference <= LOGIT_DIFFERENCE
    # Otherwise equal tokens would be luck, on this machine or another.
    assert comparison.margin >= 10 * comparison.difference
    assert used_bytes(client) == 0


def test_a_batch_of_all_prompts_gives_each_its_own_tokens(
    client: attnd.Client, model_and_tokenizer: tuple[Any, Any], local: list[Any]
) -> None:
    model, tokenizer = model_and_tokenizer
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(smollm2.PROMPTS), return_tensors="pt", padding=True)
    assert not inputs["attention_mask"].all()
    with RemoteCache(model, client) as cache:
        tokens = model.generate(
            **inputs,
            do_sample=False,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            cache=cache,
        )
    for row, run in zip(tokens[:, -TOKENS:], local, strict=True):
        assert torch.equal(row, run.tokens)


def test_bf16_storage_stays_close(client: attnd.Client, model_and_tokenizer: tuple[Any, Any], local: list[Any]) -> None:
    """The same context through a cache in bf16: the same next tokens wherever the choice was not close."""
    model, tokenizer = model_and_tokenizer
    run = local[1]
    context = torch.cat([tokenizer(smollm2.PROMPTS[1], return_tensors="pt")["input_ids"][0], run.tokens])[None, :-1]
    with torch.no_grad(), RemoteCache(model, client, kv_dtype="bf16") as cache:
        logits = model(context, cache=cache).logits[0, -TOKENS:]
    difference = float((logits - run.logits).abs().max())
    print(f"largest logit difference with K and V in bf16: {difference:.2e}")
    assert difference <= 0.5
    best = run.logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * difference
    assert clear.sum() > TOKENS / 2
    assert torch.equal(logits.argmax(-1)[clear], run.tokens[clear])
