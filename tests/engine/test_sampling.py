import math
import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import sampling
from engine.protocol import Sampling
from engine.sampling import LOGPROB_FLOOR, Sampler

EOS = 2
VOCAB = 60


def sequence(
    prompt: list[int], output: list[int] = (), *, request_id: str = "r", output_index: int = 0, **s: Any
) -> Any:
    """What the sampler reads of a sequence."""
    return SimpleNamespace(
        tokens=array("i", [*prompt, *output]),
        n_prompt=len(prompt),
        n_output=len(output),
        output_index=output_index,
        request=SimpleNamespace(id=request_id, sampling=Sampling(max_tokens=100, **s)),
    )


def sampler() -> Sampler:
    return Sampler([EOS], seed=1)


def one(logits: list[float], s: Any) -> int:
    (token,) = sampler().sample(torch.tensor([logits]), [s])
    assert token.error is None
    return token.token_id


def tokens_of(logits: list[float], n: int, **s: Any) -> list[int]:
    """n draws of a text's next token, each with its own seed."""
    rows = [
        sequence(
            [5], temperature=s.get("temperature", 1.0), seed=seed, **{k: v for k, v in s.items() if k != "temperature"}
        )
        for seed in range(n)
    ]
    return [token.token_id for token in sampler().sample(torch.tensor([logits] * n), rows)]


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals() -> None:
    assert one([0.0, 3.0, 1.0, 3.0], sequence([0], temperature=0.0)) == 1


def test_a_temperature_too_small_to_divide_by_is_zero() -> None:
    assert one([0.0, 3.0, 1.0], sequence([0], temperature=1e-30)) == 1


def test_top_k_of_one_is_greedy_even_among_equals() -> None:
    assert set(tokens_of([1.0, 4.0, 4.0, 0.0], 50, top_k=1)) == {1}


def test_draws_follow_the_probabilities() -> None:
    drawn = tokens_of([math.log(p) for p in (0.5, 0.3, 0.15, 0.05)], 20_000)
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.015  # four standard deviations


def test_filtered_draws_follow_the_renormalized_probabilities() -> None:
    drawn = tokens_of([math.log(p) for p in (0.15, 0.3, 0.5, 0.05)], 20_000, top_p=0.7)
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.abs(shares - [0.0, 0.375, 0.625, 0.0]).max() < 0.015


def test_temperature_sharpens() -> None:
    drawn = tokens_of([0.0, math.log(2.0)], 20_000, temperature=0.5)
    assert abs(drawn.count(1) / len(drawn) - 0.8) < 0.015  # 2 to the power of 1 / 0.5, to 1


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),  # of the three left, the first has 0.5 / 0.95
        ({"min_p": 0.3, "top_p": 0.52}, {0}),  # of the three left, the first has 0.5 / 0.95
        ({"top_k": 1000}, {0, 1, 2, 3}),
    ],
)
def test_filters_leave_exactly_these_tokens(filters: dict[str, Any], left: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.28, 0.17, 0.05)]
    assert set(tokens_of(logits, 400, **filters)) == left


def naive(logits: np.ndarray, s: Sampling, draw: float) -> int:
    """One row, one step after the other."""
    x = logits.astype(np.float64) / s.temperature
    p = np.exp(x - x.max())
    p[p < s.min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable") if 0 < s.top_k < len(p) or s.top_p < 1 else np.arange(len(p))
    p = p[order]
    if 0 < s.top_k < len(p):
        p[s.top_k :] = 0.0
    if s.top_p < 1:
        p[np.cumsum(p) - p >= s.top_p * p.sum()] = 0.0
    running = np.cumsum(p)
    return int(order[np.searchsorted(running, draw * running[-1], side="right")])


@pytest.mark.parametrize("candidates", [4, 512], ids=["nucleus beyond the candidates", "nucleus among them"])
def test_mixed_batches_equal_row_by_row(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    chance = random.Random(3)
    torch.manual_seed(3)
    rows = [
        sequence(
            [1, 2],
            seed=i,
            temperature=chance.choice([0.3, 1.0, 1.7]),
            top_p=chance.choice([1.0, 0.9, 0.4]),
            top_k=chance.choice([0, 0, 2, 20, VOCAB]),
            min_p=chance.choice([0.0, 0.0, 0.1]),
        )
        for i in range(300)
    ]
    logits = torch.randn(len(rows), VOCAB) * 3
    it = sampler()
    got = [token.token_id for token in it.sample(logits, rows)]
    want = [naive(x.numpy(), r.request.sampling, it._draw(r)) for x, r in zip(logits, rows, strict=True)]
    assert got == want


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB)
    mine = sequence([3], [4], seed=-7, request_id="a")
    alone = sampler().sample(logits, [mine])
    others = [sequence([1], seed=i, top_p=0.5) for i in range(9)] + [sequence([1], temperature=0.0)]
    crowd = Sampler([EOS], seed=99).sample(
        torch.cat([torch.randn(10, VOCAB), logits]), [*others, sequence([3], [4], seed=-7, request_id="b")]
    )
    assert crowd[-1] == alone[0]


def test_draws_differ_by_seed_position_output_and_request() -> None:
    it = sampler()
    rows = [
        sequence([3], seed=1),
        sequence([3], seed=2),
        sequence([3], [3], seed=1),
        sequence([3], seed=1, output_index=1),
        sequence([3], request_id="a"),
        sequence([3], request_id="b"),
    ]
    draws = [it._draw(row) for row in rows]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)
    assert it._draw(rows[4]) != Sampler([EOS], seed=2)._draw(rows[4])


def test_a_draw_at_the_very_end_never_picks_a_token_without_weight() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0]], dtype=torch.float64)
    assert sampling._pick(weights, torch.tensor([1.0, 1.0], dtype=torch.float64)).tolist() == [1, 0]
    assert sampling._pick(weights, torch.tensor([0.0, 0.0], dtype=torch.float64)).tolist() == [0, 0]


def processed(logits: list[float], s: Any) -> list[float]:
    row = torch.tensor(logits)
    sampler()._change_logits(row, s)
    return row.tolist()


def test_repetition_counts_prompt_and_output_and_scales_towards_less() -> None:
    s = sequence([0, 0], [1], repetition_penalty=2.0)
    assert processed([4.0, -4.0, 4.0], s) == [2.0, -8.0, 4.0]


def test_presence_and_frequency_count_the_output_alone() -> None:
    s = sequence([0], [1, 1, 2], presence_penalty=0.5, frequency_penalty=0.25)
    assert processed([1.0, 1.0, 1.0, 1.0], s) == [1.0, 0.0, 0.25, 1.0]


def test_logit_bias_is_added_after_the_penalties() -> None:
    s = sequence([0], repetition_penalty=2.0, logit_bias=((0, 10.0), (2, -100.0)))
    assert processed([4.0, 1.0, 1.0], s) == [12.0, 1.0, -99.0]


def test_min_tokens_holds_back_the_end_until_so_many_tokens_are_there() -> None:
    logits = [0.0, 1.0, 5.0, 4.0]
    options: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (3,)}
    assert one(logits, sequence([0], [1], **options)) == 1
    assert one(logits, sequence([0], [1, 1], **options)) == 2


def test_min_tokens_leaves_an_ignored_end_alone() -> None:
    assert one([0.0, 1.0, 5.0, 4.0], sequence([0], temperature=0.0, min_tokens=2, ignore_eos=True)) == 2


def test_the_array_of_tokens_can_grow_after_sampling() -> None:
    s = sequence([0], [1], presence_penalty=1.0, repetition_penalty=1.1)
    sampler().sample(torch.zeros(1, VOCAB), [s])
    s.tokens.append(1)


def test_the_logits_given_are_left_as_they_were() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    rows = [sequence([1], [2], presence_penalty=2.0, logit_bias=((1, 5.0),), min_tokens=9), sequence([1], top_p=0.5)]
    sampler().sample(logits, rows)
    assert torch.equal(logits, before)


def test_logprobs_are_the_models_own_whatever_else_is_asked() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    s = sequence([0], temperature=0.0, logprobs=2, logit_bias=((2, 50.0),))
    (token,) = sampler().sample(torch.tensor([logits]), [s])
    assert token.logprob is not None
    assert (token.token_id, token.logprob.token_id) == (2, 2)
    assert token.logprob.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [i for i, _ in token.logprob.top] == [0, 1]
    assert [p for _, p in token.logprob.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)


def test_each_row_reports_as_many_alternatives_as_it_asked_for() -> None:
    rows = [sequence([0], temperature=0.0, logprobs=n) for n in (None, 0, 1, 3)]
    got = [token.logprob for token in sampler().sample(torch.zeros(4, VOCAB), rows)]
    assert got[0] is None
    assert [len(logprob.top) for logprob in got[1:] if logprob] == [0, 1, 3]


def test_a_logprob_of_minus_infinity_is_reported_as_a_number() -> None:
    (token,) = sampler().sample(torch.tensor([[0.0, -math.inf]]), [sequence([0], temperature=0.0, logprobs=2)])
    assert token.logprob is not None
    assert token.logprob.top == ((0, 0.0), (1, LOGPROB_FLOOR))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_numbers_fails_alone(poison: float, temperature: float) -> None:
    logits = torch.randn(3, VOCAB)
    rows = [sequence([1], seed=i, temperature=temperature, logprobs=1) for i in range(3)]
    want = sampler().sample(logits, rows)
    logits[1, 17] = poison
    got = sampler().sample(logits, rows)
    assert got[1].error is not None and "NaN or infinity" in got[1].error
    assert got[1].logprob is None
    assert (got[0], got[2]) == (want[0], want[2])


def test_a_row_with_everything_ruled_out_is_an_error() -> None:
    (token,) = sampler().sample(torch.tensor([[0.0, -math.inf]]), [sequence([0], min_tokens=1, stop_token_ids=(0,))])
    assert token.error is not None


def test_no_rows_give_no_tokens() -> None:
    assert sampler().sample(torch.zeros(0, VOCAB), []) == []
