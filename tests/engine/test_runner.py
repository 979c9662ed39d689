"""A runner's logits are those of transformers' own forward over the whole text, however the text was cut, batched and
shared."""

import random

import numpy as np
import pytest
import torch

from engine.model_check import check_layers, compare_with_eager
from engine.model_errors import KVMemoryTooSmall
from engine.runner import ModelRunner, allocate_kv, blocks_in, flatten
from kernels.cache import KVCache, LayerShape
from tests.engine.tiny_models import CONFIGS, VOCAB, FakeChunk, FakeCopy, FakePlan, FakeSequence, build

BLOCK = 4


def eager_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_batches_equal_the_eager_forward(name: str) -> None:
    """Five sequences: chunked prompts among decodes, a prefix whose blocks two share, and a block copied for a third
    that goes another way in its middle. Every slot that was not written holds NaN."""
    model = build(name)
    random.seed(name)
    text = [random.randrange(3, VOCAB) for _ in range(40)]
    texts = [
        text[:21],
        text[:16] + [random.randrange(3, VOCAB) for _ in range(9)],  # shares 4 whole blocks with the first
        text[:18] + [random.randrange(3, VOCAB) for _ in range(8)],  # and this one 4, and half of the fifth by a copy
        [random.randrange(3, VOCAB) for _ in range(30)],
        [random.randrange(3, VOCAB) for _ in range(3)],
    ]
    want = [eager_logits(model, tokens) for tokens in texts]

    shapes = check_layers(model)
    cache = KVCache.allocate(shapes, 32, BLOCK, dtype=torch.float32)
    for layer in cache.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    runner = ModelRunner(model, cache)
    a = FakeSequence(texts[0], [31, 7, 15, 2, 20, 21])
    b = FakeSequence(texts[1], [31, 7, 15, 2, 9, 3, 1])
    c = FakeSequence(texts[2], [31, 7, 15, 2, 30, 4, 5])
    d = FakeSequence(texts[3], [10, 29, 11, 28, 12, 27, 13, 26])
    e = FakeSequence(texts[4], [0])
    order = {id(sequence): i for i, sequence in enumerate((a, b, c, d, e))}
    steps: list[tuple[list[FakeChunk], list[FakeCopy]]] = [
        ([FakeChunk(a, 0, 10, False), FakeChunk(d, 0, 1, True)], []),
        ([FakeChunk(d, 1, 1, True), FakeChunk(a, 10, 10, True), FakeChunk(e, 0, 2, True)], []),
        # b reads what a wrote in the step before; c its copy of a's fifth block
        ([FakeChunk(c, 18, 5, False), FakeChunk(b, 16, 3, True), FakeChunk(d, 2, 11, False)], [FakeCopy(20, 30, 2)]),
        (
            [
                FakeChunk(a, 20, 1, True),
                FakeChunk(b, 19, 1, True),
                FakeChunk(c, 23, 1, True),
                FakeChunk(d, 13, 1, True),
            ],
            [],
        ),
        (
            [
                FakeChunk(e, 2, 1, True),
                FakeChunk(b, 20, 1, True),
                FakeChunk(c, 24, 2, True),
                FakeChunk(d, 14, 16, True),
            ],
            [],
        ),
        ([FakeChunk(b, 21, 4, True)], []),
    ]
    worst, n_rows = 0.0, 0
    for number, (chunks, copies) in enumerate(steps):
        got = runner.execute(FakePlan(number, chunks, copies))
        assert got.dtype == torch.float32
        sampled = [chunk for chunk in chunks if chunk.samples]
        assert got.shape == (len(sampled), VOCAB)
        for row, chunk in zip(got, sampled, strict=True):
            expected = want[order[id(chunk.sequence)]][chunk.start + chunk.n_tokens - 1]
            worst = max(worst, (row - expected).abs().max().item())
            n_rows += 1
    assert n_rows == 14
    assert worst <= 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma 3, alternating windows"])
def test_equal_prompts_in_one_step_may_read_blocks_that_the_same_step_writes(name: str) -> None:
    model = build(name)
    tokens = list(range(10, 23))
    want = eager_logits(model, tokens)
    runner = ModelRunner(model, KVCache.allocate(check_layers(model), 8, BLOCK, dtype=torch.float32))
    first, second = FakeSequence(tokens, [5, 1, 6, 2]), FakeSequence(tokens, [5, 1, 6, 3])
    got = runner.execute(FakePlan(0, [FakeChunk(first, 0, 13, True), FakeChunk(second, 12, 1, True)], []))
    assert (got - want[-1]).abs().max().item() <= 1e-4


def test_a_step_in_which_nothing_samples_gives_no_rows() -> None:
    model = build("llama")
    runner = ModelRunner(model, KVCache.allocate(check_layers(model), 2, BLOCK, dtype=torch.float32))
    got = runner.execute(FakePlan(0, [FakeChunk(FakeSequence([5, 6, 7], [1]), 0, 3, False)], []))
    assert got.shape == (0, VOCAB)


def test_a_step_of_copies_alone() -> None:
    model = build("llama")
    cache = KVCache.allocate(check_layers(model), 2, BLOCK, dtype=torch.float32)
    cache.layers[2].value[0] = 1.0
    assert ModelRunner(model, cache).execute(FakePlan(0, [], [FakeCopy(0, 1, 4)])).shape == (0, VOCAB)
    assert (cache.layers[2].value[1] == 1.0).all()


def test_copies_run_before_the_step_reads_and_writes() -> None:
    model = build("llama")
    tokens = [9, 8, 7, 6, 5, 4]
    want = eager_logits(model, tokens)
    runner = ModelRunner(model, KVCache.allocate(check_layers(model), 4, BLOCK, dtype=torch.float32))
    runner.execute(FakePlan(0, [FakeChunk(FakeSequence(tokens, [0, 1]), 0, 6, False)], []))
    copied = FakeSequence(tokens, [2, 3])
    got = runner.execute(FakePlan(1, [FakeChunk(copied, 5, 1, True)], [FakeCopy(0, 2, 4), FakeCopy(1, 3, 1)]))
    assert (got[0] - want[-1]).abs().max().item() <= 1e-4


def test_flatten_gives_every_row_its_token_position_and_slot() -> None:
    first, second = FakeSequence([10, 11, 12, 13, 14, 15], [7, 3]), FakeSequence([20, 21, 22], [5, 9, 9])
    flat = flatten([FakeChunk(first, 2, 4, True), FakeChunk(second, 2, 1, False)], BLOCK)
    assert flat.tokens.tolist() == [12, 13, 14, 15, 22]
    assert flat.positions.tolist() == [2, 3, 4, 5, 2]
    assert flat.slot_mapping.tolist() == [30, 31, 12, 13, 22]
    assert flat.query_start.tolist() == [0, 4, 5]
    assert flat.context_len.tolist() == [6, 3]
    assert flat.block_tables.tolist() == [[7, 3], [5, 0]]
    assert flat.sampled_rows.tolist() == [3]
    assert (flat.tokens.dtype, flat.block_tables.dtype) == (np.int64, np.int32)


def test_a_sequence_can_grow_after_it_was_flattened() -> None:
    sequence = FakeSequence([1, 2, 3], [0])
    flat = flatten([FakeChunk(sequence, 0, 3, True)], BLOCK)
    sequence.tokens.append(4)
    assert flat.tokens.tolist() == [1, 2, 3]


def test_blocks_in_a_budget() -> None:
    shapes = [LayerShape(3, 64)] * 30  # 2 * 3 * 64 * 2 bytes a token and layer
    assert blocks_in(368_640 * 10 + 5, shapes, 16, torch.bfloat16) == 10
    with pytest.raises(KVMemoryTooSmall, match=r"one block of 16 tokens of this model takes 368,640 bytes"):
        blocks_in(368_639, shapes, 16, torch.bfloat16)


def test_a_pool_that_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(KVMemoryTooSmall, match="the device does not have"):
        allocate_kv([LayerShape(8, 128)], 10**12, 16, torch.bfloat16)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_check_at_start_passes_what_is_right(name: str) -> None:
    model = build(name)
    compare_with_eager(model, check_layers(model))
