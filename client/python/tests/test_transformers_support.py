"""RemoteCache: which models and options it takes, what it refuses, and how it ends."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import SUPPORTED
from models import COMMON, greedy, left_padded, prompt, tiny
from running_server import Server

import attnd
from attnd.transformers import RemoteCache

LOGIT_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("Llama")


def test_not_a_model(client: attnd.Client) -> None:
    with pytest.raises(TypeError, match="Linear is not a transformers model"):
        RemoteCache(torch.nn.Linear(1, 1), client)


def test_attention_weights_are_refused(client: attnd.Client, llama: Any) -> None:
    with (
        RemoteCache(llama, client) as cache,
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="output_attentions"),
    ):
        llama(prompt(1, 4), cache=cache, output_attentions=True)


def test_options_that_are_refused(client: attnd.Client, llama: Any) -> None:
    tokens = prompt(2, 5)

    def forward(message: str, **options: Any) -> None:
        with RemoteCache(llama, client) as cache, pytest.raises(NotImplementedError, match=message):
            llama(tokens, cache=cache, **options)

    forward("LlamaForCausalLM asks for gradients")
    with torch.no_grad():
        forward("with a mask of its own", attention_mask=torch.zeros(2, 1, 5, 5))
        forward("passes position_bias", position_bias=torch.zeros(1))
        forward("passes cu_seq_lens_q", cu_seq_lens_q=torch.tensor([0, 5]))
        forward("not causal", is_causal=False)
        model = tiny("Llama", attention_dropout=0.5).train()
        with (
            RemoteCache(model, client) as cache,
            pytest.raises(NotImplementedError, match=r"dropout 0.5; call model.eval"),
        ):
            model(tokens, cache=cache)


def test_masks_that_change_are_refused(client: attnd.Client, llama: Any) -> None:
    inputs = left_padded((5, 3))
    with RemoteCache(llama, client) as cache, torch.no_grad():
        llama(**inputs, cache=cache)
        for mask in (None, torch.ones(2, 6, dtype=torch.int64)):
            with pytest.raises(
                ValueError, match="the attention mask has changed for tokens that are already in the cache"
            ):
                llama(prompt(2, 1), attention_mask=mask, cache=cache)
        assert cache.get_seq_length() == 5


def test_another_batch_needs_a_reset(client: attnd.Client, llama: Any) -> None:
    with RemoteCache(llama, client) as cache, torch.no_grad():
        local = llama(prompt(3, 4)).logits
        llama(prompt(2, 4), cache=cache)
        with pytest.raises(ValueError, match="this cache holds 2 rows and the batch has 3"):
            llama(prompt(3, 4), cache=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert not list(client.list_sessions())
        assert (llama(prompt(3, 4), cache=cache).logits - local).abs().max() <= LOGIT_DIFFERENCE


def test_another_attention_is_refused(client: attnd.Client, llama: Any) -> None:
    """Under any other attention the model would see the new tokens only."""
    other = tiny("Llama")
    bypassed = pytest.raises(NotImplementedError, match="did not call attnd's attention")
    with RemoteCache(llama, client) as cache, torch.no_grad(), bypassed:
        other(prompt(1, 1), cache=cache)
    with RemoteCache(llama, client) as cache, torch.no_grad():
        llama(prompt(1, 4), cache=cache)
        llama.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="LlamaForCausalLM has its attention on 'sdpa'"):
            llama(prompt(1, 1), cache=cache)


def test_copies_are_refused(client: attnd.Client, llama: Any) -> None:
    with RemoteCache(llama, client) as cache:
        for copied in (copy.copy, copy.deepcopy):
            with pytest.raises(NotImplementedError):
                copied(cache)
        greedy(llama, {"input_ids": prompt(1, 4)}, cache=cache)
        for move in (cache.layers[0].reorder_cache, cache.layers[0].batch_select_indices):
            with pytest.raises(NotImplementedError, match="share their rows"):
                move(torch.tensor([0]))


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_calls_without_the_cache_stay_local(client: attnd.Client, name: str) -> None:
    model = tiny(name, **SUPPORTED[name])
    inputs = left_padded((14, 5))
    local = greedy(model, inputs)
    with torch.no_grad():
        alone = model(**inputs, use_cache=False).logits
        with RemoteCache(model, client) as cache:
            assert model.config._attn_implementation == "attnd"
            assert torch.equal(model(**inputs, use_cache=False).logits, alone)
            again = greedy(model, inputs)  # transformers' own cache
            assert torch.equal(local[0], again[0])
            assert torch.equal(local[1], again[1])
            assert not cache.session_ids


def test_a_vision_tower_stays_local(client: attnd.Client) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**COMMON), image_token_index=127, image_seq_length=4
    )
    model = LlavaForConditionalGeneration(config).eval()
    tokens = torch.tensor([[1, 127, 127, 127, 127, 5, 6, 7]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": torch.randn(1, 3, 16, 16)}
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    local = greedy(model, inputs)
    with RemoteCache(model, client) as cache:
        tokens, logits = greedy(model, inputs, cache=cache)
        assert len(cache.session_ids) == 1
        assert client.get_session(cache.session_ids[0]).length == 8 + 11
    assert torch.equal(local[0], tokens)
    assert (local[1] - logits).abs().max() <= LOGIT_DIFFERENCE
    assert "attnd" not in {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_forward_pass_can_be_repeated(
    client: attnd.Client, llama: Any, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    tokens = prompt(2, 8)
    local = llama(tokens).logits.detach()
    send = attnd.Client.send_step

    def fail_at_layer(self: attnd.Client, request: Any, timeout: float | None = None) -> Any:
        answer = send(self, request, timeout)  # done, and then the answer is lost
        if request.layer == failing:
            raise attnd.Unavailable("cut")
        return answer

    with RemoteCache(llama, client) as cache, torch.no_grad():
        llama(tokens[:, :5], cache=cache)
        monkeypatch.setattr(attnd.Client, "send_step", fail_at_layer)
        with pytest.raises(attnd.Unavailable):
            llama(tokens[:, :2], cache=cache)  # other tokens than those that come now
        monkeypatch.undo()
        assert cache.get_seq_length() == 5
        assert (llama(tokens[:, 5:], cache=cache).logits - local[:, 5:]).abs().max() <= LOGIT_DIFFERENCE
        assert [client.get_session(session).layer_lengths for session in cache.session_ids] == [(8, 8, 8)] * 2


def test_a_full_cache_leaves_no_half_made_rows(start_server: Callable[..., Server], llama: Any) -> None:
    server = start_server("--max_sessions=2")
    with attnd.Client(server.target) as client, RemoteCache(llama, client) as cache, torch.no_grad():
        with pytest.raises(attnd.SessionLimit):
            llama(prompt(3, 4), cache=cache)
        assert client.server_info().sessions_active == 0


@pytest.mark.parametrize("limit", ["--max_message_bytes=64KiB", "--max_queue_tokens=64"])
def test_prompts_are_cut_to_the_server_limits(start_server: Callable[..., Server], llama: Any, limit: str) -> None:
    server = start_server(limit)
    tokens = prompt(2, 200)  # 512 bytes of Q, K and V each
    with attnd.Client(server.target) as client, RemoteCache(llama, client) as cache, torch.no_grad():
        assert (llama(tokens).logits - llama(tokens, cache=cache).logits).abs().max() <= LOGIT_DIFFERENCE


def test_a_lost_cache_says_what_to_do(start_server: Callable[..., Server], llama: Any) -> None:
    """Scenario P07."""
    server = start_server()
    with torch.no_grad(), RemoteCache(llama, server.target) as cache:
        llama(prompt(1, 4), cache=cache)
        server.kill()
        start_server(listen=server.target)
        with pytest.raises(attnd.SessionLost, match="run the whole prompt again") as lost:
            llama(prompt(1, 1), cache=cache)
        assert lost.value.reason == "NEVER_EXISTED"
        cache.reset()
        llama(prompt(1, 4), cache=cache)


def test_sessions_end_with_their_cache(client: attnd.Client, llama: Any) -> None:
    cache = RemoteCache(llama, client)
    greedy(llama, {"input_ids": prompt(2, 4)}, new=2, cache=cache)
    assert len(list(client.list_sessions())) == 2
    cache.close()
    cache.close()
    assert not list(client.list_sessions())
    # The model has its own attention back, which would see the new tokens only.
    with pytest.raises(RuntimeError, match="this RemoteCache is closed"), torch.no_grad():
        llama(prompt(2, 1), cache=cache)
    cache = RemoteCache(llama, client)
    greedy(llama, {"input_ids": prompt(2, 4)}, new=2, cache=cache)
    del cache
    gc.collect()
    assert not list(client.list_sessions())


def test_sessions_end_with_the_process(server: Server, client: attnd.Client) -> None:
    program = f"""
import torch
from models import prompt, tiny
from attnd.transformers import RemoteCache
model = tiny("Llama")
cache = RemoteCache(model, {server.target!r})
with torch.no_grad():
    model(prompt(2, 4), cache=cache)
print(len(cache.session_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr
    assert not list(client.list_sessions())
