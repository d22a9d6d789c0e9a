"""Which models can keep their cache remotely. What would silently differ is refused by name."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs

# Layers whose state is K and V of every token (windows are applied by the server), and layers that keep none: they
# attend to another layer's K and V, or do not attend at all.
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "dummy")


def check_supported(model: Any) -> None:
    """Raises NotImplementedError that names the model and what is missing."""
    name = type(model).__name__
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
        raise TypeError(f"{name} is not a transformers model")
    if not model._can_set_attn_implementation():
        raise NotImplementedError(
            f"{name} does not call its attention through transformers' attention interface, so it cannot run in attnd"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{name} is an encoder-decoder model; its two caches are not supported")
    if not getattr(config, "is_causal", True):
        raise NotImplementedError(f"{name} is configured as not causal")
    others = sorted(set(get_layer_types_and_kwargs(config)[0]) - set(ATTENTION_LAYERS))
    if others:
        raise NotImplementedError(
            f"{name} has layers of type {', '.join(others)}; only K and V of attention are supported"
        )


def layer_windows(config: Any) -> list[int | None]:
    """Each layer's window in tokens, None where it has none, as the configuration of a decoder has them."""
    types, options = get_layer_types_and_kwargs(config)
    return [
        option.get("sliding_window") if kind == "sliding_attention" else None
        for kind, option in zip(types, options, strict=True)
    ]
