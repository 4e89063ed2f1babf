"""The C attention over a window: against the formula, without a look at what fell out of it, and bit by bit the same
in any chunks, blocks, batches and threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu.attention import SPLIT
from kernels.cpu.program import Pool
from tests.kernels.cpu.attention_case import Case, make_case
from tests.kernels.cpu.conftest import Machine
from tests.kernels.cpu.test_attention import KEY_TILE, TOLERANCE
from tests.kernels.windows import free_early

CONTEXTS, LENGTHS = [200, 17, 130, 1, SPLIT + 140, 300], [1, 1, 20, 1, 1, 9]


@pytest.fixture
def pool(machine: Machine) -> Pool:
    return machine.pools[2]


def windowed(case: Case, window: int) -> Case:
    """`case` with a window, and with blocks of NaN in place of those that fell out of it."""
    return replace(case, window=window, batch=free_early(case.batch, window, len(case.keys)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("window", "block_size"),
    [(1, 16), (17, 8), (100, 24), (KEY_TILE, 16), (KEY_TILE + 1, 32), (SPLIT - 1, 16), (SPLIT + 30, 16)],
)
def test_equals_reference(dtype: torch.dtype, window: int, block_size: int, pool: Pool) -> None:
    """Decode rows, prompts and later chunks, also over several splits, should equal the formula."""
    case = windowed(make_case(CONTEXTS, LENGTHS, group=7, block_size=block_size, dtype=dtype), window)
    torch.testing.assert_close(case.run(pool), case.reference(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_window_as_long_as_the_context_hides_nothing(dtype: torch.dtype, pool: Pool) -> None:
    """The bits should be those without a window; a window one shorter should change the last row of the longest."""
    case = make_case(CONTEXTS, LENGTHS, dtype=dtype)
    expected = case.run(pool)
    assert torch.equal(expected, windowed(case, max(CONTEXTS)).run(pool))
    longest = sum(LENGTHS[: CONTEXTS.index(max(CONTEXTS)) + 1]) - 1
    shorter = windowed(case, max(CONTEXTS) - 1).run(pool)
    assert not torch.equal(expected[longest], shorter[longest])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [17, KEY_TILE + 1, SPLIT + 30])
@pytest.mark.parametrize("group", [1, 7])
def test_chunks_equal_the_whole(dtype: torch.dtype, window: int, group: int, machine: Machine) -> None:
    """The rows of a prompt should have the same bits in whatever chunks it is computed, with or without the blocks that
    fell out of each chunk's window, whatever the block size and the number of threads."""
    context = SPLIT + 150
    case = replace(make_case([context], [context], group=group, dtype=dtype), window=window)
    whole = case.run(machine.pools[1])
    for block_size, threads in ((16, 1), (24, 3)):
        case = replace(make_case([context], [context], group=group, dtype=dtype, block_size=block_size), window=window)
        for chunk in (1, 7, 100):
            for start in (*range(0, context, 4 * chunk + 151), SPLIT - 1, SPLIT):
                rows = slice(start, min(start + chunk, context))
                part = case.part(0, rows)
                assert torch.equal(whole[rows], part.run(machine.pools[threads]))
                assert torch.equal(whole[rows], windowed(part, window).run(machine.pools[threads]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [100, SPLIT + 30])
def test_alone_equals_in_a_batch(dtype: torch.dtype, window: int, machine: Machine) -> None:
    """A sequence should get the same bits alone, where it is split among threads, and among others."""
    whole = replace(make_case(CONTEXTS, LENGTHS, group=3, dtype=dtype), window=window)
    together = whole.run(machine.pools[3])
    assert torch.equal(together, whole.run(machine.pools[1]))
    for i, expected in enumerate(together.split(LENGTHS)):
        assert torch.equal(expected, whole.part(i, slice(None)).run(machine.pools[2]))
