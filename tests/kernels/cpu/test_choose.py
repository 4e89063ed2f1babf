"""Tokens chosen in C are those of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import sampling
from kernels.cpu.choose import Chooser
from tests.kernels.cpu.conftest import Machine

NUM_ROWS = 40


def set_rules(chooser: Chooser, **rules: Tensor | float) -> None:
    """All rows by these; temperature 1 and no filter where nothing is said; every row with a number of its own."""
    for name, value in ({"temperatures": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": 0} | rules).items():
        getattr(chooser.rules, name)[:] = value
    rows = torch.arange(len(chooser.rules.seeds))
    chooser.rules.seeds.copy_(rows * 7919 - 3 * (rows % 2) * (1 << 60))
    chooser.rules.choices.copy_(rows % 3)
    chooser.rules.positions.copy_(rows * 31)


def expected(logits: Tensor, chooser: Chooser) -> Tensor:
    """What torch chooses."""
    rules, count = chooser.rules, len(logits)
    numbers = sampling.uniform(rules.seeds[:count], rules.choices[:count], rules.positions[:count])
    divided = logits / rules.temperatures[:count, None]
    smallest = sampling.smallest_kept(
        divided, min_p=rules.min_p[:count], top_k=rules.top_k[:count], top_p=rules.top_p[:count]
    )
    return sampling.draw(divided.masked_fill(divided < smallest[:, None], -torch.inf), numbers)


@pytest.mark.parametrize("vocab", [1, 15, 16, 100, 513, 5000])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperatures": 0.3},
        {"temperatures": 5.0},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 100_000},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperatures": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
def test_draws_equal_the_reference(vocab: int, scale: float, rules: dict[str, float], machine: Machine) -> None:
    """Every filter alone and together should leave the same tokens, and the same number draw the same one."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(NUM_ROWS, vocab, generator=generator) * scale
    chooser = Chooser(machine.pools[1], NUM_ROWS)
    set_rules(chooser, **rules)
    assert chooser.choose(logits).tolist() == expected(logits, chooser).tolist()


def test_rows_keep_to_their_own_rules(machine: Machine) -> None:
    """Greedy and random rows in one call, with any number of threads, should give what each gives alone."""
    logits = torch.randn(NUM_ROWS, 3000, generator=torch.Generator().manual_seed(1)) * 4
    results = []
    for pool in machine.pools.values():
        chooser = Chooser(pool, NUM_ROWS)
        set_rules(chooser, temperatures=torch.tensor([0.0, 0.7, 1.3, 1.0] * 10), top_k=torch.tensor([0, 5] * 20))
        results.append(chooser.choose(logits).clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0][::4], logits[::4].argmax(dim=-1))
    alone = Chooser(machine.pools[1], NUM_ROWS)
    set_rules(alone, temperatures=0.7, top_k=5)
    for name in ("seeds", "choices", "positions"):
        getattr(alone.rules, name)[0] = getattr(alone.rules, name)[1]
    assert alone.choose(logits[1:2]).item() == results[0][1].item()


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_ties_bans_and_broken_rows(top_k: int, top_p: float, machine: Machine) -> None:
    """Equal logits should stay or go together, banned and NaN ones never be drawn, nothing leave the vocabulary."""
    logits = torch.full((4, 100), -torch.inf)
    logits[0, 10:14] = 2.0  # four equal ones
    logits[1, 99] = -1e30  # the only one
    logits[2] = torch.nan
    logits[2, 7] = 0.5
    chooser = Chooser(machine.pools[1], 4)
    drawn = []
    for position in range(50):
        set_rules(chooser, top_k=top_k, top_p=top_p)
        chooser.rules.positions[:] = position
        drawn.append(chooser.choose(logits).tolist())
    first = [tokens[0] for tokens in drawn]
    assert set(first) == {10, 11, 12, 13}
    assert {tuple(tokens[1:]) for tokens in drawn} == {(99, 7, 0)}


def test_draws_follow_the_distribution(machine: Machine) -> None:
    """Over many positions the shares should be those of the softmax."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    chooser = Chooser(machine.pools[1], 1)
    set_rules(chooser)
    counts = torch.zeros(4)
    for position in range(4000):
        chooser.rules.positions[0] = position
        counts[chooser.choose(logits).item()] += 1
    assert torch.allclose(counts / 4000, logits.exp()[0], atol=0.03)
