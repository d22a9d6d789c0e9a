"""RemoteCache: every way to generate that transformers has, and moving a filled cache's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from architectures import SUPPORTED
from models import COMMON, greedy, left_padded, prompt, tiny
from running_server import Server

import attnd
from attnd.transformers import RemoteCache

LOGIT_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("Llama")


@pytest.fixture(scope="module")
def draft(llama: Any) -> Any:
    """A model that often, but not always, agrees with the other."""
    model = tiny("Llama")
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def recorded_crops(cache: RemoteCache) -> list[int]:
    """The lengths after each crop that took something away."""
    lengths: list[int] = []
    crop = cache.crop

    def record(tokens: int) -> None:
        before = cache.get_seq_length()
        crop(tokens)
        if cache.get_seq_length() < before:
            lengths.append(cache.get_seq_length())

    cache.crop = record  # type: ignore[method-assign]
    return lengths


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Gemma3n", "GptOss"])
def test_assisted_by_a_draft_model(client: attnd.Client, draft: Any, name: str) -> None:
    """The draft's tokens come several at once, and those that were wrong are cropped: also beyond a window of 8."""
    model = tiny(name, **SUPPORTED[name])
    tokens = prompt(1, 20)
    options = {"do_sample": False, "max_new_tokens": 40}
    assistant = draft if name == "Llama" else tiny("Llama")
    assistant.generation_config.num_assistant_tokens = 4
    local = model.generate(tokens, **options)
    with RemoteCache(model, client) as cache:
        crops = recorded_crops(cache)
        remote = model.generate(tokens, assistant_model=assistant, cache=cache, **options)
        assert len(list(client.list_sessions())) == 1  # the draft's own cache is local
    assert torch.equal(local, remote)
    assert len(crops) >= 3
    if name == "Llama":
        assert len(crops) < 40  # some of the draft's tokens were right


def test_sampled_beams(client: attnd.Client, llama: Any) -> None:
    options = {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 20, "temperature": 1.5}
    inputs = left_padded((7, 4))
    torch.manual_seed(3)
    local = llama.generate(**inputs, **options)
    torch.manual_seed(3)
    with RemoteCache(llama, client) as cache:
        assert torch.equal(local, llama.generate(**inputs, cache=cache, **options))


def test_one_token_after_three_is_the_fourth_of_four(client: attnd.Client, llama: Any) -> None:
    """Scenario K28: attnd rotates nothing, so K stays as the model rotated it, at the model's own positions."""
    tokens = prompt(1, 4)
    with RemoteCache(llama, client) as cache, torch.no_grad():
        together = llama(tokens).logits
        parts = [llama(tokens[:, part], cache=cache).logits for part in (slice(0, 3), slice(3, 4))]
    assert (torch.cat(parts, 1) - together).abs().max() <= 1e-5 * together.abs().max()


def test_a_prompt_in_chunks(client: attnd.Client, llama: Any) -> None:
    inputs = {"input_ids": prompt(1, 30)}
    local = greedy(llama, inputs)
    with RemoteCache(llama, client) as cache:
        assert torch.equal(local[0], greedy(llama, inputs, cache=cache, prefill_chunk_size=8)[0])


@pytest.mark.parametrize(
    ("options", "repository"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive-search"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group-beam-search"),
        ({"dola_layers": "low"}, "dola"),
    ],
)
def test_ways_to_generate_that_transformers_has_moved_out(
    client: attnd.Client, llama: Any, options: dict[str, Any], repository: str
) -> None:
    """Contrastive and group-beam search and DoLa are repositories of their own since 5.0: transformers says which."""
    with RemoteCache(llama, client) as cache, pytest.raises(ValueError, match=f"transformers-community/{repository}"):
        llama.generate(prompt(1, 5), do_sample=False, max_new_tokens=4, cache=cache, **options)


@pytest.mark.parametrize("name", ["Llama", "Gemma4", "GptOss"])
def test_rows_are_repeated_and_selected(client: attnd.Client, name: str) -> None:
    """What contrastive search does each step: candidates of every row side by side, of which one goes on."""
    model = tiny(name, **SUPPORTED.get(name, {}))
    inputs = left_padded((12, 5))
    candidates = prompt(6, 1, seed=8)
    last = prompt(3, 2, seed=9)
    chosen = [4, 1, 1]

    def run(cache: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            first = model(**inputs, cache=cache).logits[:, -1]
            cache.batch_repeat_interleave(3)
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.int64)], 1).repeat_interleave(3, 0)
            tried = model(candidates, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, cache=cache)
            cache.batch_select_indices(torch.tensor(chosen))
            mask = torch.cat([mask[chosen], torch.ones(3, 2, dtype=torch.int64)], 1)
            positions = (mask.cumsum(1) - 1)[:, -2:]
            gone_on = model(last, attention_mask=mask, position_ids=positions, cache=cache)
        return [first, tried.logits, gone_on.logits]

    local = run(transformers.DynamicCache(config=model.config))
    with RemoteCache(model, client) as cache:
        for one, other in zip(local, run(cache), strict=True):
            assert (one - other).abs().max() <= LOGIT_DIFFERENCE
        assert len(cache.session_ids) == len(list(client.list_sessions())) == (6 if name == "Gemma4" else 3)
        lengths = [client.get_session(session).length for session in cache.session_ids[:3]]
        assert lengths == [5 + 3, 12 + 3, 12 + 3]
    assert client.server_info().kv_cache_used_bytes == 0


def test_a_selection_that_fails_leaves_the_rows_as_they_were(start_server: Callable[..., Server], llama: Any) -> None:
    server = start_server("--max_sessions=3")
    tokens = prompt(2, 6)
    with attnd.Client(server.target) as client, RemoteCache(llama, client) as cache, torch.no_grad():
        llama(tokens[:, :4], cache=cache)
        before = cache.session_ids
        with pytest.raises(attnd.SessionLimit):
            cache.batch_repeat_interleave(2)
        with pytest.raises(IndexError):
            cache.batch_select_indices(torch.tensor([2]))
        with pytest.raises(ValueError, match="no row is selected"):
            cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
        assert cache.session_ids == before == [session.session_id for session in client.list_sessions()]
        logits = llama(tokens[:, 4:], cache=cache).logits
        assert (llama(tokens).logits[:, 4:] - logits).abs().max() <= LOGIT_DIFFERENCE


def test_cross_attention_stays_local(client: attnd.Client) -> None:
    """A decoder's attention to what an encoder has seen is not the cache's."""
    model = tiny("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=256, add_cross_attention=True)
    torch.manual_seed(1)
    inputs = {**left_padded((9, 5)), "encoder_hidden_states": torch.randn(2, 6, 64)}
    local = greedy(model, inputs)
    other = greedy(model, {**inputs, "encoder_hidden_states": torch.randn(2, 6, 64)})
    assert (local[1] - other[1]).abs().max() > 100 * LOGIT_DIFFERENCE
    with RemoteCache(model, client) as cache:
        tokens, logits = greedy(model, inputs, cache=cache)
        assert [client.get_session(session).length for session in cache.session_ids] == [9 + 11, 5 + 11]
    assert torch.equal(local[0], tokens)
    assert (local[1] - logits).abs().max() <= LOGIT_DIFFERENCE


def test_qwen2_vl(client: attnd.Client) -> None:
    """Positions of three kinds, and a vision tower whose attention is given lengths instead of a mask."""
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8}
    config = transformers.Qwen2VLConfig(
        text_config={**COMMON, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        vision_config=vision,
        image_token_id=127,
        video_token_id=126,
        vision_start_token_id=125,
        vision_end_token_id=124,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    tokens = torch.tensor([[1, 125, 127, 127, 127, 127, 124, 5, 6, 7]])
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (tokens == 127).int(),
    }
    local = greedy(model, inputs)
    with RemoteCache(model, client) as cache:
        remote = greedy(model, inputs, cache=cache)
        assert [client.get_session(session).length for session in cache.session_ids] == [10 + 11]
    assert torch.equal(local[0], remote[0])
    assert (local[1] - remote[1]).abs().max() <= LOGIT_DIFFERENCE


def test_images_that_see_ahead_are_refused(client: attnd.Client) -> None:
    """Gemma 3 lets the tokens of an image see each other, in both directions."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = transformers.Gemma3TextConfig(**{**COMMON, **SUPPORTED["Gemma3"]})
    config = transformers.Gemma3Config(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        mm_tokens_per_image=4,
        image_token_index=127,
        boi_token_index=126,
        eoi_token_index=125,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    image = torch.tensor([[1, 126, 127, 127, 127, 127, 125, 5, 6, 7]])
    inputs = {
        "input_ids": image,
        "attention_mask": torch.ones_like(image),
        "pixel_values": torch.randn(1, 3, 16, 16),
        "token_type_ids": (image == 127).int(),
    }
    with (
        RemoteCache(model, client) as cache,
        pytest.raises(NotImplementedError, match="Gemma3ForConditionalGeneration adds a mask function of its own"),
    ):
        greedy(model, inputs, cache=cache)
    text_only = {"input_ids": prompt(1, 12)}
    with RemoteCache(model, client) as cache:
        assert torch.equal(greedy(model, text_only)[0], greedy(model, text_only, cache=cache)[0])
