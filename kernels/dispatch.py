"""Picks the path that serves a call: the first one that does not decline it.

A path is a module-like object with the three functions below and `declines`, which says in words why it cannot take a
call, or nothing. The last path takes everything. RADIXGATE_KERNELS=name forces one path, for tests and for doubts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.cache import AttentionBatch, KVCache, LayerCache
from kernels.torch_path import TorchPath

log = logging.getLogger(__name__)


class KernelPath(Protocol):
    name: str

    def declines(self, layer: LayerCache, n_heads: int) -> str | None:
        """Why this path cannot serve this layer with so many query heads. None: it can."""

    def write_kv(self, layer: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None: ...

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
    ) -> Tensor: ...

    def copy_blocks(self, cache: KVCache, sources: Sequence[int], targets: Sequence[int]) -> None: ...


PATHS: tuple[KernelPath, ...] = (TorchPath(),)
"""Fastest first."""


class UnknownKernelPath(ValueError):
    pass


def write_kv(layer: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Store key and value, [T, kv_heads, head_dim] each, at the slots int64 [T]."""
    _path(layer, layer.key.shape[2]).write_kv(layer, key, value, slot_mapping)


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
    """[T, H, D] -> [T, H, D] in the query's dtype; see kernels.reference.attention for what it means. The rows' own
    K and V must have been written before."""
    return _path(layer, query.shape[1]).attention(
        query, layer, batch, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )


def copy_blocks(cache: KVCache, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole blocks in every layer. Every source is read before a target is written."""
    if len(sources):
        _path(cache.layers[0], cache.layers[0].key.shape[2]).copy_blocks(cache, sources, targets)


_selected: dict[tuple[object, ...], KernelPath] = {}


def _path(layer: LayerCache, n_heads: int) -> KernelPath:
    memory = layer.key
    kind = (memory.device.type, memory.dtype, *memory.shape[1:], n_heads)
    path = _selected.get(kind)
    if path is None:
        path = _selected[kind] = _select(layer, n_heads)
    return path


def _select(layer: LayerCache, n_heads: int) -> KernelPath:
    paths = PATHS
    if forced := os.environ.get("RADIXGATE_KERNELS"):
        paths = tuple(path for path in PATHS if path.name == forced)
        if not paths:
            names = ", ".join(path.name for path in PATHS)
            raise UnknownKernelPath(f"RADIXGATE_KERNELS={forced} names no kernel path; there are: {names}")
    for path in paths:
        reason = path.declines(layer, n_heads)
        if reason is None:
            return path
        log.warning("kernels: the %s path does not serve this model: %s", path.name, reason)
    raise UnknownKernelPath(f"RADIXGATE_KERNELS={forced} cannot serve this model; unset it to use another path")
