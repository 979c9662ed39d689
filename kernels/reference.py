"""What the kernels compute, in plain loops and float64. The tests hold every path against it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cache import AttentionBatch, KVCache, LayerCache


def write_kv(layer: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    for row, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, layer.block_size)
        layer.key[block, offset] = key[row]
        layer.value[block, offset] = value[row]


def attention(
    query: Tensor,
    layer: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """float64 [T, H, D]. A row sees the tokens of its own sequence up to its own position, at most `sliding_window`
    of them, itself included. A sink is one more logit per head that takes weight and gives nothing."""
    n_rows, n_heads, head_dim = query.shape
    heads_per_kv = n_heads // layer.key.shape[2]
    out = torch.zeros(n_rows, n_heads, head_dim, dtype=torch.float64)
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()
    for sequence, context_len in enumerate(lengths):
        first, last = starts[sequence], starts[sequence + 1]
        for row in range(first, last):
            position = context_len - (last - row)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(n_heads):
                scores, values = [], []
                for token in range(oldest, position + 1):
                    block = int(batch.block_tables[sequence, token // batch.block_size])
                    offset = token % batch.block_size
                    key = layer.key[block, offset, head // heads_per_kv].double()
                    score = float(query[row, head].double() @ key) * scale
                    scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
                    values.append(layer.value[block, offset, head // heads_per_kv].double())
                logits = torch.tensor(scores, dtype=torch.float64)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head].double().reshape(1)])
                weights = torch.softmax(logits, dim=0)[: len(values)]
                out[row, head] = weights @ torch.stack(values)
    return out


def copy_blocks(cache: KVCache, sources: Sequence[int], targets: Sequence[int]) -> None:
    for layer in cache.layers:
        for memory in layer:
            read = [memory[source].clone() for source in sources]
            for target, block in zip(targets, read, strict=True):
                memory[target] = block
