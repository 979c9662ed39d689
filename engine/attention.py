"""Our attention inside transformers' own modules.

A model loaded as usual and then given `set_attn_implementation(NAME)` calls `attend` in every layer, with the flattened
batch [1, T] it was run on and the keyword `batch=StepInput(...)` that the runner passed to it. Each layer writes its
rows' K and V to the paged cache and attends over the block tables; no mask is ever built.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from kernels import dispatch
from kernels.cache import AttentionBatch, KVCache

NAME = "radixgate"


class StepInput(NamedTuple):
    cache: KVCache
    attention: AttentionBatch


class LayerCall(NamedTuple):
    """What one layer asked of the attention; seen by a `CallRecorder`."""

    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    unknown: tuple[str, ...]
    """Keywords that ask for something we do not do."""


class CallRecorder:
    """Passed as `batch=` it notes what every layer asks for, and answers with zeros."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []


_HARMLESS = frozenset({"dropout", "is_causal", "use_cache", "position_ids", "cache_position", "output_router_logits"})


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: StepInput | CallRecorder,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, KH, T, D] -> ([1, T, H, D], None)."""
    if isinstance(batch, CallRecorder):
        unknown = [
            name for name, given in options.items() if not (given is None or given is False or name in _HARMLESS)
        ]
        if attention_mask is not None:
            unknown.append("attention_mask")
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            unknown.append("is_causal=False")
        shape = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        batch.calls.append(LayerCall(int(module.layer_idx), *shape, sliding_window, tuple(unknown)))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    layer = batch.cache.layers[module.layer_idx]
    dispatch.write_kv(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), batch.attention.slot_mapping)
    out = dispatch.attention(
        query[0].transpose(0, 1),
        layer,
        batch.attention,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


AttentionInterface.register(NAME, attend)
