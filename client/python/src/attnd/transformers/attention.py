"""The attention function that transformers calls, and putting a model on it."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .masks import NAME, MaskPlan, mask_plan
from .sessions import LayerKind, SessionKind

if TYPE_CHECKING:
    from .layer import RemoteLayer

# What models hand down to the attention function without meaning it: it changes nothing in the attention itself.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class _Thread(threading.local):
    """The layer whose update() was called last and whose attention has not come yet."""

    pending: RemoteLayer | None = None


_thread = _Thread()

# What a configuration's attention was before it was put here, by the configuration's id (they cannot be hashed).
_local: dict[int, tuple[weakref.ref[Any], str]] = {}


def set_pending(layer: RemoteLayer | None) -> None:
    """Raises NotImplementedError when the attention of an earlier update() never came."""
    earlier, _thread.pending = _thread.pending, layer
    if layer is not None and earlier is not None and earlier.state is layer.state:
        _thread.pending = None
        raise NotImplementedError(
            f"layer {earlier.index} gave its K and V to a RemoteCache of {layer.state.model_name} but did not call "
            "attnd's attention through transformers' attention interface"
        )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """A layer of a RemoteCache: the server's attention. Anything else (vision towers, no cache): the model's own."""
    layer, _thread.pending = _thread.pending, None
    owner: RemoteLayer | None = getattr(key, "attnd_layer", None)
    if layer is None and owner is None:
        return _attend_locally(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    stores = layer is not None
    layer = layer or owner
    assert layer is not None
    name = layer.state.model_name
    if owner is not layer or not layer.gave(key, value):
        raise NotImplementedError(f"{name} changes K or V between its cache and its attention; that is not supported")
    kind = _kind(name, module, query, key, value, scaling, dropout, kwargs)
    if not isinstance(attention_mask, MaskPlan):
        given = "no mask" if attention_mask is None else f"a mask of its own ({type(attention_mask).__name__})"
        raise NotImplementedError(
            f"{name} came with {given}; only padding (a 2D attention_mask) and what transformers derives from it are "
            "supported"
        )
    # A layer without K and V of its own (Gemma 3n's last ones) asks the layer that has them, with its queries alone.
    new = (key, value) if stores else (None, None)
    return layer.state.attend(layer.index, kind, attention_mask, query, *new), None


def _kind(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> LayerKind:
    """Raises NotImplementedError naming the option that would make the result differ."""
    window, softcap, sinks = (kwargs.pop(option, None) for option in ("sliding_window", "softcap", "s_aux"))
    causal = kwargs.pop("is_causal", None)
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if not causal:
        raise NotImplementedError(f"{name} asks for attention that is not causal")
    if dropout:
        raise NotImplementedError(f"{name} asks for dropout {dropout}; call model.eval()")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise NotImplementedError(f"{name} asks for gradients, which the cache does not give; use torch.no_grad()")
    if kwargs.pop("output_attentions", False):
        raise NotImplementedError(f"{name} asks for attention weights (output_attentions), which are not returned")
    for option, given in kwargs.items():
        if given is not None and option not in _WITHOUT_EFFECT:
            raise NotImplementedError(f"{name} passes {option} to its attention, which is not supported")
    session = SessionKind(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        softcap=None if softcap is None else float(softcap),
    )
    return LayerKind(
        session,
        window=None if window is None else int(window),
        sinks=None if sinks is None else tuple(float(sink) for sink in sinks.detach().reshape(-1).tolist()),
    )


def _attend_locally(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, Any]:
    """With the implementation that the module's configuration had before."""
    remembered = _local.get(id(getattr(module, "config", None)))
    implementation = remembered[1] if remembered else "sdpa"
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    if isinstance(mask, MaskPlan):
        mask = mask.build(implementation)
    result: tuple[torch.Tensor, Any] = function(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return result


# How many open caches a model has.
_open_caches: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def attach(model: Any) -> None:
    """Puts a model's attention here. Several caches may be on one model."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_plan)
    for config in _configs(model):
        if config._attn_implementation != NAME:
            forget = functools.partial(_forget, id(config))
            _local[id(config)] = (weakref.ref(config, forget), config._attn_implementation)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise NotImplementedError(f"{type(model).__name__} did not accept the attention implementation {NAME!r}")
    _open_caches[model] = _open_caches.get(model, 0) + 1


def _forget(config_id: int, _: object) -> None:
    _local.pop(config_id, None)


def release(model: Any) -> None:
    """One open cache less."""
    _open_caches[model] = _open_caches.get(model, 1) - 1


def restore_if_unused(model: Any) -> None:
    """Gives a model without open caches its own attention back."""
    if _open_caches.get(model, 0) > 0:
        return
    for config in _configs(model):
        remembered = _local.get(id(config))
        if remembered is not None and config._attn_implementation == NAME:
            config._attn_implementation_internal = remembered[1]


def _configs(model: Any) -> list[Any]:
    """The configurations of a model and of the models in it, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found.setdefault(id(module.config), module.config)
    with contextlib.suppress(AttributeError):
        text = model.config.get_text_config(decoder=True)
        found.setdefault(id(text), text)
    return list(found.values())
