"""Runs one step of the model: the plan's chunks as one flattened batch, one forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention import StepInput
from engine.model_errors import KVMemoryTooSmall
from kernels import dispatch
from kernels.cache import AttentionBatch, KVCache, LayerShape, block_bytes

if TYPE_CHECKING:
    from engine.plan import Chunk, StepPlan


class ModelRunner:
    """A loaded model (engine.models) and its KV memory."""

    def __init__(self, module: torch.nn.Module, cache: KVCache) -> None:
        self.module = module
        self.cache = cache
        self.block_size = cache.layers[0].block_size
        self.device = cache.layers[0].key.device

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor:
        """float32 [rows, vocab]: the last row's logits of every chunk with samples=True, in plan order. A plan without
        chunks only copies.

        Raises what torch raises (out of memory, a broken kernel); the KV memory of the plan's chunks is then undefined
        and every other block is as it was.
        """
        dispatch.copy_blocks(self.cache, [copy.source for copy in plan.copies], [copy.target for copy in plan.copies])
        if not plan.chunks:
            return torch.empty(0, self.module.config.vocab_size, device=self.device)
        arrays = flatten(plan.chunks, self.block_size)
        tokens, positions, slots, sampled = (
            torch.from_numpy(array).to(self.device)
            for array in (arrays.tokens, arrays.positions, arrays.slot_mapping, arrays.sampled_rows)
        )
        batch = AttentionBatch(
            torch.from_numpy(arrays.query_start).to(self.device),
            torch.from_numpy(arrays.context_len).to(self.device),
            torch.from_numpy(arrays.block_tables).to(self.device),
            slots,
            self.block_size,
        )
        output = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sampled,
            batch=StepInput(self.cache, batch),
        )
        return output.logits[0].float()


class FlatBatch(NamedTuple):
    """A plan as arrays. T rows, S sequences."""

    tokens: np.ndarray
    """int64 [T]"""
    positions: np.ndarray
    """int64 [T]"""
    slot_mapping: np.ndarray
    """int64 [T]"""
    query_start: np.ndarray
    """int32 [S + 1]"""
    context_len: np.ndarray
    """int32 [S]"""
    block_tables: np.ndarray
    """int32 [S, longest]"""
    sampled_rows: np.ndarray
    """int64, the last row of every chunk that samples"""


def flatten(chunks: Many[Chunk], block_size: int) -> FlatBatch:
    """One Python iteration a chunk; everything a token is numpy."""
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    n_rows = np.fromiter((chunk.n_tokens for chunk in chunks), np.int64, len(chunks))
    samples = np.fromiter((chunk.samples for chunk in chunks), np.bool_, len(chunks))
    context_len = starts + n_rows
    query_start = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(n_rows, out=query_start[1:])
    n_blocks = -(-context_len // block_size)
    tokens = np.empty(int(query_start[-1]), np.int64)
    tables = np.zeros((len(chunks), int(n_blocks.max(initial=0))), np.int32)
    for i, chunk in enumerate(chunks):
        # No view of `tokens` outlives its line: an array that lends its buffer cannot grow.
        tokens[query_start[i] : query_start[i + 1]] = np.frombuffer(chunk.sequence.tokens, np.int32)[
            chunk.start : chunk.start + chunk.n_tokens
        ]
        holding = chunk.sequence.holding
        assert holding is not None, f"{chunk.sequence} is in a step and holds no blocks"
        tables[i, : n_blocks[i]] = holding.blocks[: n_blocks[i]]
    sequence = np.repeat(np.arange(len(chunks)), n_rows)
    positions = np.arange(len(tokens)) + (starts - query_start[:-1])[sequence]
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return FlatBatch(
        tokens,
        positions,
        slots,
        query_start.astype(np.int32),
        context_len.astype(np.int32),
        tables,
        (query_start[1:] - 1)[samples],
    )


def blocks_in(budget_bytes: int, shapes: Many[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """How many KV blocks fit in `budget_bytes`. Raises KVMemoryTooSmall when not even one does."""
    size = block_bytes(shapes, block_size, dtype)
    n_blocks = budget_bytes // size
    if n_blocks < 1:
        raise KVMemoryTooSmall(
            f"the KV memory of {budget_bytes:,} bytes is too small: one block of {block_size} tokens of this model "
            f"takes {size:,} bytes; give more --kv-memory or a smaller --block-size"
        )
    return n_blocks


def allocate_kv(
    shapes: Many[LayerShape], n_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> KVCache:
    """The KV pool, every byte of it touched. Raises KVMemoryTooSmall when the device does not have that much."""
    try:
        return KVCache.allocate(shapes, n_blocks, block_size, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        total = n_blocks * block_bytes(shapes, block_size, dtype)
        raise KVMemoryTooSmall(
            f"{n_blocks:,} KV blocks take {total:,} bytes, which the device does not have ({error}); "
            "give a smaller --kv-memory or --kv-blocks"
        ) from error
