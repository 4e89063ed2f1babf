"""Random numbers, filters and the draw, each against an independent formula."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import sampling as ops


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The generator should give the published values (Random123's known-answer tests)."""
    c0, c1, c2, c3 = (torch.tensor([value]) for value in counter)
    k0, k1 = (torch.tensor([value]) for value in key)
    assert tuple(int(word) for word in ops.philox((c0, c1, c2, c3), (k0, k1))) == expected


def test_uniform_is_a_function_of_seed_choice_and_position() -> None:
    """Numbers should be equal for equal triples, differ when any of the three does, and fill [0, 1) evenly."""
    seeds, choices, positions = torch.tensor([7, 7, 7, -7]), torch.tensor([0, 1, 0, 0]), torch.tensor([3, 3, 4, 3])
    numbers = ops.uniform(seeds, choices, positions)
    assert len(set(numbers.tolist())) == 4
    for row in range(4):
        alone = ops.uniform(seeds[row : row + 1], choices[row : row + 1], positions[row : row + 1])
        assert torch.equal(alone[0], numbers[row])
    many = ops.uniform(torch.full((20000,), 5), torch.zeros(20000, dtype=torch.int64), torch.arange(20000))
    counts = torch.histc(many.float(), bins=50, min=0.0, max=1.0)
    assert float(((counts - 400) ** 2 / 400).sum()) < 85.4  # 99.9 % point of chi-square with 49 degrees of freedom
    assert 0.0 <= float(many.min()) <= float(many.max()) < 1.0


def test_draw_follows_the_distribution() -> None:
    """Draws should occur as often as the softmax says, and never a token that is excluded."""
    logits = torch.tensor([1.0, 0.0, -torch.inf, 2.0, 0.5])
    numbers = ops.uniform(torch.full((20000,), 9), torch.zeros(20000, dtype=torch.int64), torch.arange(20000))
    counts = torch.bincount(ops.draw(logits.expand(20000, 5), numbers), minlength=5)
    wanted = logits.softmax(-1) * 20000
    kept = wanted > 0
    assert int(counts[2]) == 0
    assert float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum()) < 16.3  # 99.9 %, 3 degrees of freedom


def test_draw_equals_reference() -> None:
    """The vectorised draw should pick the token that walking the distribution does, at its borders too."""
    torch.manual_seed(1)
    logits = torch.randn(200, 1000)
    numbers = torch.rand(200, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64)
    assert torch.equal(ops.draw(logits, numbers), ops.draw_reference(logits, numbers))


def filter_by_sorting(logits: list[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    """Kept token ids, by the textbook definitions applied one after another."""
    best = max(logits)
    kept = [i for i, x in enumerate(logits) if math.exp(x - best) >= min_p]
    kept = sorted(kept, key=lambda i: -logits[i])[: top_k or None]
    total, share, nucleus = sum(math.exp(logits[i]) for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        share += math.exp(logits[i]) / total
        if share >= top_p:
            break
    return set(nucleus)


@pytest.mark.parametrize("vocab", [5, 300, 5000])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
@pytest.mark.parametrize("top_k", [0, 1, 3, 40, 2000])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 1.0])
def test_filters_equal_sorting(vocab: int, min_p: float, top_k: int, top_p: float) -> None:
    """The threshold should keep what the definitions keep, for flat and peaked rows in one batch."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator) * torch.tensor([[0.2], [1.0], [4.0]])
    full = {"min_p": torch.full((3,), min_p), "top_k": torch.full((3,), top_k), "top_p": torch.full((3,), top_p)}
    kept = logits >= ops.smallest_kept(logits, **full)[:, None]
    for row in range(3):
        expected = filter_by_sorting(logits[row].double().tolist(), min_p, top_k, top_p)
        assert expected == set(kept[row].nonzero().flatten().tolist())


def test_filters_keep_ties_together() -> None:
    """Equal logits at the border should be kept or dropped together; the best one is always kept."""
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    one = torch.ones(1)
    assert ops.smallest_kept(logits, min_p=one * 0, top_k=torch.tensor([2]), top_p=one).tolist() == [1.0]
    assert ops.smallest_kept(logits, min_p=one * 0, top_k=torch.tensor([0]), top_p=one * 1e-9).tolist() == [3.0]
    assert ops.smallest_kept(logits, min_p=one, top_k=torch.tensor([0]), top_p=one).tolist() == [3.0]


def test_penalties_equal_the_formula() -> None:
    """Repetition should count prompt and output, presence and frequency the output only."""
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    in_prompt = torch.tensor([[True, True, False, False, False]])
    counts = torch.tensor([[0, 0, 1, 3, 0]], dtype=torch.int32)
    ops.apply_penalties(
        logits,
        in_prompt,
        counts,
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.5]),
        frequency=torch.tensor([0.25]),
    )
    assert logits.tolist() == [[1.0, -4.0, 1.0 - 0.5 - 0.25, -4.0 - 0.5 - 0.75, 2.0]]
