"""The sampler over sequences: order of processors, memory, determinism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.sequence import Sequence
from gpu_worker.sampling.sampler import Sampler
from kernels.cpu.build import load_library
from kernels.cpu.choose import Chooser
from kernels.cpu.program import Pool
from shared.ids import RequestId
from shared.messages import SamplingParams

VOCAB = 50


MAX_NUM_SEQS = 3000
pools: list[Pool] = []
"""Holds a pool while tests run with the CPU kernels."""


@pytest.fixture(autouse=True, params=["torch", "kernels"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test should hold for torch and for the CPU kernels."""
    if request.param == "torch":
        yield
        return
    pools.append(Pool(load_library(request.getfixturevalue("cpu_kernels")), 2))
    yield
    pools.pop().close()


def make_sampler(vocab_size: int = VOCAB) -> Sampler:
    chooser = Chooser(pools[0], MAX_NUM_SEQS) if pools else None
    return Sampler(vocab_size=vocab_size, max_num_seqs=MAX_NUM_SEQS, device=torch.device("cpu"), chooser=chooser)


def make_sequence(prompt: list[int], output: list[int] | None = None, *, choice: int = 0, **sampling: Any) -> Sequence:
    """A sequence that has drawn `output`."""
    settings = {"seed": 1, "max_tokens": 100, "temperature": 0.0} | sampling
    return Sequence(
        request_id=RequestId("cmpl-test"),
        attempt=1,
        choice=choice,
        rank=0,
        token_ids=[*prompt, *(output or [])],
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**settings),
    )


def make_logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw_one(sampler: Sampler, logits: torch.Tensor, sequence: Sequence) -> DrawnToken:
    (drawn,) = sampler.draw(logits.clone(), [sequence])
    return drawn


def test_greedy_takes_the_largest_lowest_id_first() -> None:
    """Temperature 0 should give the largest logit, and the lowest id among equal ones."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [30, 7, 41]] = 5.0
    assert draw_one(make_sampler(), logits, make_sequence([1])).token_id == 7


def test_rows_are_independent() -> None:
    """Each sequence should draw the same token alone as beside others with other settings."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "seed": 2},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},
        {"logit_bias": ((3, -100.0),), "num_logprobs": 3},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ]
    sequences = [make_sequence([1, 2], [3, 3], choice=i, **each) for i, each in enumerate(settings)]
    logits = make_logits(len(sequences))
    together = make_sampler().draw(logits.clone(), sequences)
    for i, each in enumerate(settings):
        alone = make_sequence([1, 2], [3, 3], choice=i, **each)
        assert together[i] == draw_one(make_sampler(), logits[i : i + 1], alone)


def test_draws_depend_on_seed_choice_and_position() -> None:
    """The same three should give the same token; over many draws each of them should change some."""
    logits, sampler = torch.zeros(1, VOCAB), make_sampler()

    def draws(seed: int, choice: int, start: int) -> list[int]:
        return [
            draw_one(sampler, logits, make_sequence([1], [2] * p, seed=seed, choice=choice, temperature=1.0)).token_id
            for p in range(start, start + 20)
        ]

    base = draws(5, 0, 0)
    assert base == draws(5, 0, 0)
    assert draws(5, 0, 3)[:10] == base[3:13]
    for other in (draws(6, 0, 0), draws(5, 1, 0), draws(2**63 - 1, 0, 0), draws(5 + 2**32, 0, 0)):
        assert other != base


def test_temperature_sharpens() -> None:
    """Frequencies over positions should follow softmax(logits / temperature)."""
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, :3] = torch.tensor([0.0, 1.0, 2.0])
    for temperature in (0.5, 2.0):
        sequences = [make_sequence([1], [2] * p, temperature=temperature) for p in range(3000)]
        drawn = make_sampler().draw(logits.expand(3000, VOCAB).clone(), sequences)
        counts = torch.bincount(torch.tensor([d.token_id for d in drawn]), minlength=3)
        wanted = (logits[0, :3] / temperature).softmax(-1) * 3000
        assert float(((counts - wanted) ** 2 / wanted).sum()) < 13.8  # 99.9 %, 2 degrees of freedom


def test_logit_bias_forces_and_bans() -> None:
    """Case 39: +100 should force a token, −100 ban the greedy one; ids outside the vocabulary have no effect."""
    logits, sampler = make_logits(), make_sampler()
    best = int(logits.argmax())
    worst = int(logits.argmin())
    assert draw_one(sampler, logits, make_sequence([1], logit_bias=((worst, 100.0),))).token_id == worst
    second = int(logits[0].topk(2).indices[1])
    assert draw_one(sampler, logits, make_sequence([1], logit_bias=((best, -100.0),))).token_id == second
    assert draw_one(sampler, logits, make_sequence([1], logit_bias=((VOCAB + 5, 100.0),))).token_id == best


def test_min_tokens_bans_the_end() -> None:
    """End tokens should not be drawn before `min_tokens`, not even when forced by a bias, and be drawn from then on."""
    logits, sampler = torch.zeros(1, VOCAB), make_sampler()
    settings = {"min_tokens": 2, "stop_token_ids": (9, 10), "logit_bias": ((9, 100.0),)}
    for num_output in range(4):
        drawn = draw_one(sampler, logits, make_sequence([1], [3] * num_output, **settings))
        assert (drawn.token_id == 9) == (num_output >= 2)


def test_penalties_follow_the_tokens() -> None:
    """Cases 47, 49: on first and second token, repetition should count prompt and output, the others output only."""
    logits, sampler = make_logits() / 4 + 3, make_sampler()
    prompt = [int(i) for i in logits[0].topk(3).indices]
    best = prompt[0]
    assert draw_one(sampler, logits, make_sequence(prompt, presence_penalty=2.0)).token_id == best
    assert draw_one(sampler, logits, make_sequence(prompt, frequency_penalty=2.0)).token_id == best
    expected = logits[0].clone()
    expected[prompt] = torch.where(expected[prompt] > 0, expected[prompt] / 1.8, expected[prompt] * 1.8)
    first = draw_one(sampler, logits, make_sequence(prompt, repetition_penalty=1.8)).token_id
    assert first == int(expected.argmax())
    assert first != best
    again = [best, best]
    expected = logits[0].clone()
    expected[best] -= 2 * 0.7 + 0.5
    with_output = make_sequence([1], again, frequency_penalty=0.7, presence_penalty=0.5)
    assert draw_one(sampler, logits, with_output).token_id == int(expected.argmax())


def test_memory_follows_the_sequence_step_by_step() -> None:
    """Drawing step by step should give what a fresh sequence with the same tokens gives."""
    sampler = make_sampler()
    settings = {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 1.0, "logit_bias": ((4, 3.0),)}
    growing = make_sequence([1, 2, 3], **settings)
    for step in range(12):
        logits = make_logits(seed=step)
        fresh = make_sequence([1, 2, 3], growing.token_ids[3:], **settings)
        expected = draw_one(sampler, logits, fresh)
        sampler.forget(fresh)
        assert expected == draw_one(sampler, logits, growing)
        growing.token_ids.append(expected.token_id)


def test_rows_are_reused_clean() -> None:
    """A forgotten sequence should leave nothing behind, and rows should never run out."""
    sampler, logits = make_sampler(), make_logits()
    expected = draw_one(sampler, logits, make_sequence([1], repetition_penalty=1.1)).token_id
    for i in range(40):
        used = make_sequence([expected], [expected] * 5, presence_penalty=2.0, logit_bias=((i, 50.0),))
        draw_one(sampler, logits, used)
        sampler.forget(used)
        assert used.sampling_row is None
    sequence = make_sequence([1], repetition_penalty=1.1)
    assert draw_one(sampler, logits, sequence).token_id == expected


def test_padded_ids_are_never_drawn() -> None:
    """Case 50: ids beyond the tokenizer should not be drawn or listed, however large their logits or the bias."""
    logits = make_logits(vocab=VOCAB + 14)
    logits[0, VOCAB:] = 50.0
    sequences = [
        make_sequence([1], [2] * p, temperature=t, logit_bias=((VOCAB + 1, 100.0),), num_logprobs=20)
        for p in range(20)
        for t in (0.0, 5.0)
    ]
    for start in range(0, len(sequences), 4):
        sampler, part = make_sampler(), sequences[start : start + 4]
        for drawn in sampler.draw(logits.expand(4, -1).clone(), part):
            assert drawn.token_id < VOCAB
            assert drawn.logprobs is not None
            assert all(token_id < VOCAB for token_id, _ in drawn.logprobs.top)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_logprobs_are_those_of_the_raw_model(temperature: float) -> None:
    """Cases 43, 45: logprobs should not change with temperature, bias or filters, and sum to 1 over the vocabulary."""
    logits = make_logits()
    sequence = make_sequence(
        [1], temperature=temperature, top_k=3, logit_bias=((7, 100.0),), num_logprobs=VOCAB, presence_penalty=1.0
    )
    drawn = draw_one(make_sampler(), logits, sequence)
    expected = torch.log_softmax(logits[0].double(), -1)
    assert drawn.token_id == 7
    assert drawn.logprobs is not None
    assert drawn.logprobs.chosen == pytest.approx(float(expected[7]), abs=1e-5)
    assert dict(drawn.logprobs.top) == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)
    assert sum(math.exp(value) for _, value in drawn.logprobs.top) == pytest.approx(1.0, abs=1e-5)
    assert [value for _, value in drawn.logprobs.top] == sorted((v for _, v in drawn.logprobs.top), reverse=True)


def test_number_of_logprobs() -> None:
    """None should give none, 0 the chosen token's only, k the k best, each row its own."""
    logits = make_logits(3)
    counts = (None, 0, 4)
    drawn = make_sampler().draw(logits.clone(), [make_sequence([1], num_logprobs=count) for count in counts])
    assert drawn[0].logprobs is None
    assert drawn[1].logprobs is not None
    assert drawn[1].logprobs.top == ()
    assert drawn[2].logprobs is not None
    assert [i for i, _ in drawn[2].logprobs.top] == logits[2].topk(4).indices.tolist()
    assert drawn[2].logprobs.top[0] == (drawn[2].token_id, drawn[2].logprobs.chosen)


def test_greedy_is_untouched_by_its_neighbours() -> None:
    """Case 42: a greedy row with a ban beside a random row should be as alone, with finite logprobs."""
    logits = make_logits(2)
    best = int(logits[0].argmax())
    greedy = make_sequence([1], logit_bias=((best, -100.0),), num_logprobs=2)
    drawn = make_sampler().draw(logits.clone(), [greedy, make_sequence([1], temperature=1.0, num_logprobs=2)])
    alone = make_sequence([1], logit_bias=((best, -100.0),), num_logprobs=2)
    assert drawn[0] == draw_one(make_sampler(), logits[:1], alone)
    assert all(d.logprobs is not None and math.isfinite(d.logprobs.chosen) for d in drawn)


def test_several_rows_of_a_sequence_are_drawn_by_their_positions() -> None:
    """Rows of one sequence should give what they give when the sequence has come that far: random numbers, bans and
    bias are those of the row's position."""
    sampling: dict[str, Any] = {
        "temperature": 1.0, "seed": 5, "min_tokens": 4, "stop_token_ids": tuple(range(40)), "logit_bias": ((45, 2.0),),
        "num_logprobs": 1,
    }  # fmt: skip
    logits = make_logits(6)
    sequence = make_sequence([1, 2], [3], **sampling)
    rows = make_sampler().draw(logits.clone(), [sequence] * 6, list(range(1, 7)))
    for i in range(6):
        later = make_sequence([1, 2], [3] * (1 + i), **sampling)
        assert rows[i] == draw_one(make_sampler(), logits[i : i + 1], later)
    assert all(row.token_id >= 40 for row in rows[:3])
    assert any(row.token_id < 40 for row in rows[3:])
