"""Tiny seeded models: they need no weights, and show whether remote attention gives the local logits and tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers

torch.set_num_threads(1)

# Names that differ between architectures are set by each architecture's own options.
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Weights large enough that tokens are chosen by a clear margin.
WEIGHT_SPREAD = 0.05


def tiny(name: str, **options: Any) -> Any:
    """``transformers.<name>ForCausalLM`` (or LMHeadModel), in eval mode."""
    # Of models that also see or hear, the part that writes.
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = kind(**{**COMMON, **options})
    kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data += WEIGHT_SPREAD * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(batch: int, tokens: int, seed: int = 2) -> torch.Tensor:
    """int64 [batch, tokens], without the padding token."""
    return torch.randint(2, COMMON["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A batch whose rows have these numbers of tokens."""
    tokens = prompt(len(lengths), max(lengths))
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return {"input_ids": tokens * mask, "attention_mask": mask}


def greedy(
    model: Any, inputs: dict[str, torch.Tensor], new: int = 12, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [batch, prompt + new] and the logits [new, batch, vocabulary] they were chosen by."""
    result = model.generate(
        **inputs, do_sample=False, max_new_tokens=new, return_dict_in_generate=True, output_logits=True, **options
    )
    return result.sequences, torch.stack(result.logits)
