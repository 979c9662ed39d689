"""Does this model compute with our attention what it computes with its own?"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from engine.attention import NAME, CallRecorder, LayerCall, StepInput
from engine.model_errors import UnsupportedModel
from kernels.cache import AttentionBatch, KVCache, LayerShape

CHECK_TOKENS = 24
CHECK_BLOCK_SIZE = 4
CHECK_BOUND = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Allowed difference of the logits, root mean square, in standard deviations of the logits. In half precision a deep
model differs by some hundredths from one order of additions to another; a wrong mask or position moves it by units."""


@torch.inference_mode()
def check_layers(module: Any) -> tuple[LayerShape, ...]:
    """Runs the model once without attention and returns the shape of every layer's KV.

    Raises UnsupportedModel when a layer does not attend exactly once, keeps no KV of its own, or asks for what our
    attention does not do. Leaves the model on our attention.
    """
    kind = module.config.model_type
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(f"{kind} cannot compute the logits of chosen rows alone (logits_to_keep)")
    module.set_attn_implementation(NAME)
    recorder = CallRecorder()
    try:
        _run(module, _sample_tokens(module), recorder)
    except Exception as error:
        raise UnsupportedModel(f"{kind} does not run on a flattened batch: {error}") from error
    expected = list(range(module.config.num_hidden_layers))
    called = [call.layer for call in recorder.calls]
    if called != expected:
        raise UnsupportedModel(
            f"{kind} has {len(expected)} layers, and attention was called for {called}: "
            "layers that share another's KV, or that keep a state instead of KV (recurrent, linear attention), cannot "
            "be served"
        )
    for call, window in zip(recorder.calls, _windows(module.config), strict=True):
        _check_call(kind, call, window)
    return tuple(LayerShape(call.n_kv_heads, call.head_dim) for call in recorder.calls)


def _check_call(kind: str, call: LayerCall, window: int | None) -> None:
    where = f"{kind}, layer {call.layer}:"
    if call.unknown:
        raise UnsupportedModel(f"{where} attention with {', '.join(call.unknown)} is not supported")
    if call.value_dim != call.head_dim:
        raise UnsupportedModel(f"{where} keys of {call.head_dim} and values of {call.value_dim} (latent attention)")
    if call.n_heads % call.n_kv_heads:
        raise UnsupportedModel(f"{where} {call.n_heads} query heads do not divide among {call.n_kv_heads} KV heads")
    if call.sliding_window != window:
        raise UnsupportedModel(
            f"{where} the configuration says a window of {window} tokens, the layer asks for {call.sliding_window}"
        )


def _windows(config: Any) -> list[int | None]:
    """The sliding window of every layer as the configuration has it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if kinds:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    return [window] * config.num_hidden_layers


@torch.inference_mode()
def compare_with_eager(module: Any, shapes: tuple[LayerShape, ...]) -> None:
    """Raises UnsupportedModel when a text's logits differ between transformers' attention and ours, with the text
    computed in two steps next to another sequence. Leaves the model on our attention."""
    tokens = _sample_tokens(module)
    module.set_attn_implementation("eager")
    try:
        want = module(input_ids=tokens[None], use_cache=False).logits[0, [CHECK_TOKENS - 2, CHECK_TOKENS - 1]].float()
    finally:
        module.set_attn_implementation(NAME)
    got = _two_steps(module, shapes, tokens)
    bound = CHECK_BOUND.get(module.dtype, CHECK_BOUND[torch.bfloat16])
    difference = ((got - want).square().mean().sqrt() / want.std()).item()
    if not difference <= bound:
        raise UnsupportedModel(
            f"{module.config.model_type}: its logits differ by {difference:.3g} standard deviations from those of "
            f"transformers' own attention (allowed: {bound}); this architecture would be served wrongly, or its "
            "weights are not numbers"
        )


def _two_steps(module: Any, shapes: tuple[LayerShape, ...], tokens: Tensor) -> Tensor:
    """Logits of the last two tokens: a chunk of all but one beside a shorter sequence, then a decode beside it."""
    device, n = tokens.device, CHECK_TOKENS
    n_blocks = -(-n // CHECK_BLOCK_SIZE)
    cache = KVCache.allocate(shapes, 2 * n_blocks, CHECK_BLOCK_SIZE, dtype=module.dtype, device=device)
    tables = torch.arange(2 * n_blocks, dtype=torch.int32, device=device).flip(0).view(2, n_blocks)

    def step(starts: tuple[int, int], ends: tuple[int, int]) -> Tensor:
        positions = torch.cat([torch.arange(*span, device=device) for span in zip(starts, ends, strict=True)])
        rows = torch.tensor([end - start for start, end in zip(starts, ends, strict=True)], device=device)
        owner = torch.repeat_interleave(torch.arange(2, device=device), rows)
        slots = tables[owner, positions // CHECK_BLOCK_SIZE].long() * CHECK_BLOCK_SIZE + positions % CHECK_BLOCK_SIZE
        batch = AttentionBatch(
            torch.tensor([0, int(rows[0]), int(rows.sum())], dtype=torch.int32, device=device),
            torch.tensor(ends, dtype=torch.int32, device=device),
            *(tables, slots, CHECK_BLOCK_SIZE),
        )
        last = torch.tensor([int(rows[0]) - 1], device=device)
        return _run(module, tokens[positions], StepInput(cache, batch), positions, last)

    return torch.cat([step((0, 0), (n - 1, n // 2)), step((n - 1, n // 2), (n, n // 2 + 3))])


def _run(
    module: Any, tokens: Tensor, batch: object, positions: Tensor | None = None, keep: Tensor | None = None
) -> Tensor:
    if positions is None:
        positions = torch.arange(len(tokens), device=tokens.device)
    if keep is None:
        keep = torch.tensor([len(tokens) - 1], device=tokens.device)
    output = module(
        input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep, batch=batch
    )
    return output.logits[0].float()


def _sample_tokens(module: Any) -> Tensor:
    """Spread over the vocabulary, the same every time, no two alike."""
    vocabulary = module.config.vocab_size
    return (torch.arange(CHECK_TOKENS, device=module.device) * 7919 + 13) % vocabulary
