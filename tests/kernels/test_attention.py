"""Every kernel path against the reference in float64: random shapes, and NaN in every slot that holds no token."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from kernels import dispatch, reference
from kernels.cache import AttentionBatch, KVCache, LayerCache, LayerShape, block_bytes
from kernels.torch_path import _groups

ERROR_BOUND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Inputs are standard normal: outputs are averages of them. Half precision rounds the weights and the output once."""


def random_batch(
    rows_and_contexts: list[tuple[int, int]],
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> tuple[Tensor, LayerCache, AttentionBatch]:
    """A query and a layer whose blocks lie in random order, with NaN in each slot that holds no token."""
    torch.manual_seed(seed)
    n_blocks = [-(-context // block_size) for _, context in rows_and_contexts]
    order = torch.randperm(sum(n_blocks) + 2).tolist()
    layer = KVCache.allocate([LayerShape(n_kv_heads, head_dim)], len(order), block_size, dtype=dtype).layers[0]
    for memory in layer:
        memory.fill_(float("nan"))
    tables = torch.full((len(n_blocks), max(n_blocks)), order[-1], dtype=torch.int32)
    query_start, slots = [0], []
    for i, ((rows, context), count) in enumerate(zip(rows_and_contexts, n_blocks, strict=True)):
        tables[i, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
        own = [int(tables[i, t // block_size]) * block_size + t % block_size for t in range(context)]
        key, value = (torch.randn(context, n_kv_heads, head_dim).to(dtype) for _ in range(2))
        reference.write_kv(layer, key, value, torch.tensor(own))
        slots += own[context - rows :]
        query_start.append(query_start[-1] + rows)
    batch = AttentionBatch(
        torch.tensor(query_start, dtype=torch.int32),
        torch.tensor([context for _, context in rows_and_contexts], dtype=torch.int32),
        tables,
        torch.tensor(slots),
        block_size,
    )
    return torch.randn(query_start[-1], n_heads, head_dim).to(dtype), layer, batch


MIXED = [(1, 37), (5, 5), (1, 1), (7, 23), (1, 30), (1, 9), (2, 40)]


def check(query: Tensor, layer: LayerCache, batch: AttentionBatch, **options: object) -> None:
    options = {"scale": query.shape[2] ** -0.5, **options}
    got = dispatch.attention(query, layer, batch, **options)
    assert got.dtype == query.dtype
    want = reference.attention(query, layer, batch, **options)
    assert not want.isnan().any()
    assert (got.double() - want).abs().max().item() <= ERROR_BOUND[query.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=["MHA", "GQA", "MQA"])
def test_a_mixed_batch_equals_the_reference(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    n_heads, n_kv_heads = heads
    check(*random_batch(MIXED, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=32, block_size=4, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 256])
def test_every_block_size(block_size: int) -> None:
    check(*random_batch(MIXED, n_heads=4, n_kv_heads=2, head_dim=16, block_size=block_size, dtype=torch.float32))


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_every_head_size(head_dim: int) -> None:
    check(*random_batch(MIXED, n_heads=4, n_kv_heads=2, head_dim=head_dim, block_size=8, dtype=torch.float32))


OPTIONS = {
    "window": {"sliding_window": 6},
    "window of one": {"sliding_window": 1},
    "window longer than any context": {"sliding_window": 1000},
    "soft cap": {"softcap": 1.5},
    "scale": {"scale": 0.31},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "all": {"sliding_window": 5, "softcap": 2.0, "scale": 0.5, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, dtype: torch.dtype) -> None:
    query, layer, batch = random_batch(MIXED, n_heads=4, n_kv_heads=2, head_dim=32, block_size=4, dtype=dtype)
    check(query, layer, batch, **OPTIONS[name])


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed: int) -> None:
    chance = random.Random(seed)
    n_kv_heads = chance.choice([1, 2, 3])
    sequences = []
    for _ in range(chance.randint(1, 6)):
        context = chance.randint(1, 60)
        sequences.append((chance.choice([1, 1, chance.randint(1, context)]), context))
    query, layer, batch = random_batch(
        sequences,
        n_heads=n_kv_heads * chance.choice([1, 2, 4]),
        n_kv_heads=n_kv_heads,
        head_dim=chance.choice([32, 40, 64]),
        block_size=chance.choice([1, 3, 16, 32]),
        dtype=torch.float32,
        seed=seed,
    )
    check(query, layer, batch, sliding_window=chance.choice([None, chance.randint(1, 70)]))


def test_a_chunk_longer_than_a_tile_of_query_rows() -> None:
    query, layer, batch = random_batch(
        [(300, 310)], n_heads=1, n_kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32
    )
    check(query, layer, batch)
    check(query, layer, batch, sliding_window=20)


def test_a_sequence_with_nan_in_its_own_context_spoils_no_other() -> None:
    query, layer, batch = random_batch(MIXED, n_heads=4, n_kv_heads=2, head_dim=32, block_size=4, dtype=torch.float32)
    want = dispatch.attention(query, layer, batch, scale=0.1)
    layer.value[int(batch.block_tables[0, 0]), 0] = float("nan")
    got = dispatch.attention(query, layer, batch, scale=0.1)
    assert got[0].isnan().all()
    assert torch.equal(got[1:], want[1:])


def test_decodes_share_a_rectangle_only_when_less_than_half_of_each_row_is_padding() -> None:
    import numpy as np

    lengths = np.array([100, 10, 51, 50, 9, 1])
    groups = [group.tolist() for group in _groups(np.arange(6), lengths)]
    assert groups == [[0, 2], [3], [1, 4], [5]]


def test_write_kv_fills_the_mapped_slots_and_no_other() -> None:
    layer = KVCache.allocate([LayerShape(2, 8)], 4, 4, dtype=torch.float32).layers[0]
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    dispatch.write_kv(layer, key, value, torch.tensor([13, 2, 7]))
    for row, (block, offset) in enumerate([(3, 1), (0, 2), (1, 3)]):
        assert torch.equal(layer.key[block, offset], key[row])
        assert torch.equal(layer.value[block, offset], value[row])
    assert int(layer.key.abs().sum(dim=(2, 3)).count_nonzero()) == 3


def test_copy_blocks_reads_every_source_before_it_writes_a_target() -> None:
    cache = KVCache.allocate([LayerShape(1, 4), LayerShape(2, 8)], 3, 2, dtype=torch.float32)
    for block, memory in itertools.product(range(3), [memory for layer in cache.layers for memory in layer]):
        memory[block] = block + 1
    dispatch.copy_blocks(cache, [0, 1], [1, 2])
    for memory in (memory for layer in cache.layers for memory in layer):
        assert [int(memory[block].unique()) for block in range(3)] == [1, 1, 2]


def test_copy_blocks_with_nothing_to_copy() -> None:
    dispatch.copy_blocks(KVCache.allocate([LayerShape(1, 4)], 1, 2, dtype=torch.float32), [], [])


def test_block_bytes_counts_k_and_v_of_every_layer() -> None:
    assert block_bytes([LayerShape(3, 64)] * 30, 16, torch.bfloat16) == 2 * 30 * 16 * 3 * 64 * 2
    assert block_bytes([LayerShape(1, 8), LayerShape(2, 4)], 1, torch.float32) == 2 * 4 * (8 + 8)


def test_a_forced_path_that_does_not_exist_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXGATE_KERNELS", "abacus")
    monkeypatch.setattr(dispatch, "_selected", {})
    layer = KVCache.allocate([LayerShape(1, 4)], 1, 2, dtype=torch.float32).layers[0]
    with pytest.raises(dispatch.UnknownKernelPath, match=r"abacus.*there are: torch"):
        dispatch.write_kv(layer, torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.tensor([0]))
