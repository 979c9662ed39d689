"""The paged KV memory of a model, and the index tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """One layer's K and V, each [n_blocks, block_size, kv_heads, head_dim]. Slot s is row s % block_size of block
    s // block_size."""

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        return self.key.shape[1]


class LayerShape(NamedTuple):
    n_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVCache:
    layers: tuple[LayerCache, ...]

    @staticmethod
    def allocate(
        shapes: Sequence[LayerShape],
        n_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Memory for `n_blocks` blocks in every layer, one shape a layer. All of it is written once, so that a
        machine which cannot hold it says so here and not in the middle of a request."""

        def zeros(shape: LayerShape) -> Tensor:
            memory = torch.empty(n_blocks, block_size, shape.n_kv_heads, shape.head_dim, dtype=dtype, device=device)
            return memory.zero_()

        return KVCache(tuple(LayerCache(zeros(shape), zeros(shape)) for shape in shapes))


def block_bytes(shapes: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    return sum(2 * block_size * shape.n_kv_heads * shape.head_dim * dtype.itemsize for shape in shapes)


@dataclass(slots=True)
class AttentionBatch:
    """A flattened mixed batch: sequence i owns query rows query_start[i] to query_start[i + 1], which are the last
    tokens of its context. A decode is a sequence with one row, a prompt chunk one with several.

    Block tables are padded with any valid block number; padding is never read.
    """

    query_start: Tensor
    """int32 [S + 1]"""
    context_len: Tensor
    """int32 [S], tokens after this step: the rows of this step are part of the context."""
    block_tables: Tensor
    """int32 [S, max_blocks]"""
    slot_mapping: Tensor
    """int64 [T], where each row's K and V go."""
    block_size: int
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What a path derives from the index tensors once a step and shares between the layers, by a key of its own."""
