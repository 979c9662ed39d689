"""Random models of a few thousand weights, one of every kind of attention, and a scheduler's parts small enough to
steer by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 160
WINDOW = 7

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def _config(class_name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, class_name)(**{**_COMMON, **changes})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=32),
    "mistral, window": _config("MistralConfig", sliding_window=WINDOW),
    "gemma 2, soft caps and windows": _config(
        "Gemma2Config", head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24, attn_logit_softcapping=0.5
    ),
    "gemma 3, alternating windows": _config(
        "Gemma3TextConfig",
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi-3": _config("Phi3Config"),
    "olmo 2": _config("Olmo2Config"),
    "mixtral": _config("MixtralConfig", num_local_experts=4, **_EXPERTS),
    "qwen3 moe": _config("Qwen3MoeConfig", num_experts=4, moe_intermediate_size=48, head_dim=16, **_EXPERTS),
    "gpt-oss, sinks": _config(
        "GptOssConfig",
        num_local_experts=4,
        head_dim=16,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **_EXPERTS,
    ),
}


def build(name: str) -> Any:
    """The model in float32 on transformers' own eager attention, with weights large enough for attention to matter."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(8.0)
            elif (parameter == 0).all():
                parameter.normal_(std=0.5)
    return model


class FakeHolding:
    def __init__(self, blocks: list[int]) -> None:
        self.blocks = np.array(blocks, dtype=np.int32)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)


class FakeSequence:
    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens = array("i", tokens)
        self.holding = FakeHolding(blocks)


class FakeChunk(NamedTuple):
    sequence: FakeSequence
    start: int
    n_tokens: int
    samples: bool


class FakeCopy(NamedTuple):
    source: int
    target: int
    n_tokens: int


class FakePlan(NamedTuple):
    step: int
    chunks: list[FakeChunk]
    copies: list[FakeCopy]
