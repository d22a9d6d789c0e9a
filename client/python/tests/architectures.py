"""The architectures of the table, as tiny models, and what their table says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_SLIDING_AND_FULL = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_KV = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

# transformers.<name>ForCausalLM and the options of its configuration beside models.COMMON. Windows are shorter than the
# prompts, so that they bind.
SUPPORTED: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "BitNet": {},
    "CodeGen": {**_GPT2, "rotary_dim": 8},
    "Cohere": {},
    "Cohere2": _SLIDING_AND_FULL,
    "Ernie4_5": {"head_dim": 16},
    "Exaone4": _SLIDING_AND_FULL,
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "GPT2": _GPT2,
    "GPTBigCode": _GPT2,
    "GPTJ": {**_GPT2, "rotary_dim": 8},
    "GPTNeoX": {"rotary_pct": 0.25},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "Gemma3": _SLIDING_AND_FULL,
    "Gemma3n": {
        **_SHARED_KV,
        "intermediate_size": 96,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "Gemma4": {**_SHARED_KV, "global_head_dim": 32},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16},
    "GptOss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Granite": {"attention_multiplier": 0.1},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Helium": {"head_dim": 16},
    "Llama": {},
    "Ministral": {"head_dim": 16, "sliding_window": 8},
    "Mistral": {"sliding_window": 8},
    "Mixtral": {"num_local_experts": 4},
    "Nemotron": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo2": {},
    "Olmo3": _SLIDING_AND_FULL,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Persimmon": {},
    "Phi": {},
    "Phi3": {"sliding_window": 8},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 16},
    "SeedOss": {"head_dim": 16},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 8},
}

# Refused when the cache is made, or by the first step.
REFUSED: dict[str, dict[str, Any]] = {
    "Bloom": {"n_layer": 2, "n_head": 4},
    "DeepseekV2": {**_MLA, "n_routed_experts": 4},
    "DeepseekV3": {**_MLA, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "DiffLlama": {},
    "Doge": {},
    "Falcon": {},
    "FalconH1": {},
    "JetMoe": {},
    "Llama4": {"num_local_experts": 2, "attention_chunk_size": 16, "head_dim": 16, "num_hidden_layers": 4},
    "Mamba": {},
    "Mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "RecurrentGemma": {},
    "T5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
}

# Columns of a table and what separates them, but not the numbers, which differ between machines.
_NUMBER = re.compile(r"\d\.\de[-+]\d\d")
NUMBER = "#"


@dataclass(frozen=True)
class Finding:
    """What was seen of one architecture.

    Attributes:
        equal: whether all tokens are, of each way to generate.
        difference: the largest between two greedy logits.
        shows: what the model has that the server must honour.
    """

    name: str
    equal: dict[str, bool]
    difference: float
    shows: str

    def row(self) -> str:
        verdicts = " | ".join("equal" if equal else "DIFFERENT" for equal in self.equal.values())
        return f"| {self.name} | {self.shows} | {verdicts} | {self.difference:.1e} |"


def page(findings: list[Finding], refusals: dict[str, str], versions: str) -> str:
    """The whole table, as Markdown."""
    ways = " | ".join(findings[0].equal)
    lines = [
        "# Architectures",
        "",
        f"Written by `tests/test_transformers_architectures.py` ({versions}):",
        "tiny models with random weights, generated with their attention in this process and with it in attnd.",
        "*equal*: the same tokens. Left-padded, and beam search (three beams of each row): a batch of",
        "three rows of different lengths. The last column is the largest difference between two logits that greedy",
        "tokens were chosen by, in float32. These are examples: a `RemoteCache` takes every model whose attention goes",
        "through transformers' attention interface and refuses by name what it would compute differently.",
        "",
        f"| transformers.…ForCausalLM | what it shows | {ways} | logits |",
        f"| --- | --- |{' --- |' * (len(findings[0].equal) + 1)}",
        *(finding.row() for finding in findings),
        "",
        "Refused, with the message of the `NotImplementedError`:",
        "",
        "| model | message |",
        "| --- | --- |",
        *(f"| {name} | {message} |" for name, message in refusals.items()),
        "",
    ]
    return "\n".join(lines)


def verdicts(text: str) -> list[str]:
    """The rows of a page without their numbers."""
    return [_NUMBER.sub(NUMBER, line) for line in text.splitlines() if line.startswith("|")]


def numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text)]
