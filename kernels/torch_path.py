"""Attention with torch's own operators, for every device and dtype: gather each context, then SDPA.

No slot beyond a sequence's context is ever read, not even to be masked: a slot may hold another sequence's NaN, and
NaN times a weight of zero is NaN. Padding therefore repeats a sequence's own last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cache import AttentionBatch, KVCache, LayerCache

TILE_ROWS = 256
"""Query rows of a prompt chunk that share one mask: bounds the mask's memory and skips keys behind the tile."""


class DecodeGroup(NamedTuple):
    """Decodes of similar length, padded to one rectangle."""

    rows: Tensor
    """int64 [S]"""
    slots: Tensor
    """int64 [S * L]"""
    mask: Tensor | None
    """bool [S, 1, 1, L], True where a key counts. None: nothing is padded."""


class Tile(NamedTuple):
    rows: slice
    keys: slice
    """Among the chunk's gathered keys."""
    mask: Tensor | None
    """bool [rows, keys]. None: every row sees every key."""


class Chunk(NamedTuple):
    slots: Tensor
    """int64 [L]"""
    tiles: list[Tile]


class Plan(NamedTuple):
    """What every layer with the same window does in this step."""

    decodes: list[DecodeGroup]
    chunks: list[Chunk]


class TorchPath:
    name = "torch"

    def declines(self, layer: LayerCache, n_heads: int) -> str | None:
        return None

    def write_kv(self, layer: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        layer.key.flatten(0, 1).index_copy_(0, slot_mapping, key.to(layer.key.dtype))
        layer.value.flatten(0, 1).index_copy_(0, slot_mapping, value.to(layer.value.dtype))

    def attention(
        self,
        query: Tensor,
        layer: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        plan = batch.plans.get((self.name, sliding_window))
        if plan is None:
            plan = batch.plans[(self.name, sliding_window)] = make_plan(batch, sliding_window)
        attend = _Attend(scale, softcap, sinks)
        out = torch.empty_like(query)
        for group in plan.decodes:
            out[group.rows] = _decode(query[group.rows], layer, group, attend)
        for chunk in plan.chunks:
            _prefill(out, query, layer, chunk, attend)
        return out

    def copy_blocks(self, cache: KVCache, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = cache.layers[0].key.device
        source, target = (torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in (sources, targets))
        for layer in cache.layers:
            for memory in layer:
                memory.index_copy_(0, target, memory.index_select(0, source))


# --- planning: numpy over the step's index tensors, once a step -------------------------------------------------------


def make_plan(batch: AttentionBatch, window: int | None) -> Plan:
    starts = batch.query_start.cpu().numpy().astype(np.int64)
    context_len = batch.context_len.cpu().numpy().astype(np.int64)
    tables = batch.block_tables.cpu().numpy().astype(np.int64)
    device = batch.slot_mapping.device
    n_rows = np.diff(starts)
    single = np.flatnonzero(n_rows == 1)
    decodes = [
        _plan_group(starts[members], context_len[members], tables[members], batch.block_size, window, device)
        for members in _groups(single, np.minimum(context_len, window or context_len.max(initial=0)))
    ]
    chunks = [
        _plan_chunk(int(starts[i]), int(n_rows[i]), int(context_len[i]), tables[i], batch.block_size, window, device)
        for i in np.flatnonzero(n_rows > 1)
    ]
    return Plan(decodes, chunks)


def _groups(members: np.ndarray, n_keys: np.ndarray) -> list[np.ndarray]:
    """Members with at most half of a group's rectangle padded: each longer than half of the group's longest."""
    order = members[np.argsort(-n_keys[members], kind="stable")]
    groups = []
    while len(order):
        lengths = n_keys[order]
        size = int(np.searchsorted(-lengths, -(lengths[0] // 2), side="left"))
        groups.append(order[: max(size, 1)])
        order = order[max(size, 1) :]
    return groups


def _plan_group(
    rows: np.ndarray,
    context_len: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> DecodeGroup:
    oldest = np.zeros_like(context_len) if window is None else np.maximum(context_len - window, 0)
    n_keys = context_len - oldest
    longest = int(n_keys.max())
    offsets = np.arange(longest)
    tokens = oldest[:, None] + np.minimum(offsets[None, :], n_keys[:, None] - 1)
    slots = np.take_along_axis(tables, tokens // block_size, axis=1) * block_size + tokens % block_size
    mask = None
    if int(n_keys.min()) < longest:
        mask = torch.from_numpy(offsets[None, :] < n_keys[:, None])[:, None, None, :].to(device)
    return DecodeGroup(torch.from_numpy(rows).to(device), torch.from_numpy(slots.reshape(-1)).to(device), mask)


def _plan_chunk(
    first_row: int,
    n_rows: int,
    context_len: int,
    table: np.ndarray,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> Chunk:
    first_position = context_len - n_rows
    oldest = 0 if window is None else max(0, first_position - window + 1)
    tokens = np.arange(oldest, context_len)
    slots = table[tokens // block_size] * block_size + tokens % block_size
    tiles = []
    for begin in range(0, n_rows, TILE_ROWS):
        end = min(begin + TILE_ROWS, n_rows)
        positions = np.arange(first_position + begin, first_position + end)
        low = oldest if window is None else max(oldest, int(positions[0]) - window + 1)
        keys = np.arange(low, first_position + end)
        mask = keys[None, :] <= positions[:, None]
        if window is not None:
            mask &= keys[None, :] > positions[:, None] - window
        tiles.append(
            Tile(
                slice(first_row + begin, first_row + end),
                slice(low - oldest, first_position + end - oldest),
                None if mask.all() else torch.from_numpy(mask).to(device),
            )
        )
    return Chunk(torch.from_numpy(slots).to(device), tiles)


# --- computing --------------------------------------------------------------------------------------------------------


def _gather(memory: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    return memory.flatten(0, 1).index_select(0, slots).to(dtype)


def _decode(query: Tensor, layer: LayerCache, group: DecodeGroup, attend: _Attend) -> Tensor:
    """query [S, H, D] -> [S, H, D]. The heads that share a KV head stand as rows of one small matrix, so K and V are
    not repeated."""
    n_sequences, n_heads, head_dim = query.shape
    n_kv_heads = layer.key.shape[2]
    key, value = (
        _gather(memory, group.slots, query.dtype).view(n_sequences, -1, n_kv_heads, head_dim).transpose(1, 2)
        for memory in layer
    )
    grouped = query.view(n_sequences, n_kv_heads, n_heads // n_kv_heads, head_dim)
    return attend(grouped, key, value, group.mask, heads_as_rows=True).reshape(query.shape)


def _prefill(out: Tensor, query: Tensor, layer: LayerCache, chunk: Chunk, attend: _Attend) -> None:
    key, value = (_gather(memory, chunk.slots, query.dtype).transpose(0, 1)[None] for memory in layer)
    heads_per_kv = query.shape[1] // key.shape[1]
    if heads_per_kv > 1:
        key, value = key.repeat_interleave(heads_per_kv, 1), value.repeat_interleave(heads_per_kv, 1)
    for tile in chunk.tiles:
        rows = query[tile.rows].transpose(0, 1)[None]
        result = attend(rows, key[:, :, tile.keys], value[:, :, tile.keys], tile.mask, heads_as_rows=False)
        out[tile.rows] = result[0].transpose(0, 1)


class _Attend(NamedTuple):
    scale: float
    softcap: float | None
    sinks: Tensor | None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, heads_as_rows: bool
    ) -> Tensor:
        """query [B, KH, R, D], key and value [B, KH, L, D], mask broadcastable to [B, KH, R, L]."""
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        scores = (query.float() @ key.float().transpose(-1, -2)) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            # One more column per query head; a head is a row of its KV head's matrix in decodes, a matrix in chunks.
            shape = (1, key.shape[1], -1, 1) if heads_as_rows else (1, -1, 1, 1)
            sinks = self.sinks.float().view(shape).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
        return (weights @ value.float()).to(query.dtype)
