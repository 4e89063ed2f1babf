"""The block pool counts owners and never leaks or doubles a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.block_pool import BlockPool


def test_should_free_a_shared_block_with_its_last_owner() -> None:
    """A block with two owners should stay taken until both gave it back."""
    pool = BlockPool(4, 16)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert pool.num_free == 3
    pool.check_integrity([[block]])
    pool.free([block])
    assert pool.num_free == 4


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_should_count_part_filled_blocks(num_tokens: int, expected: int) -> None:
    """Only the last block of a sequence should be part-empty."""
    assert BlockPool(4, 16).blocks_for(num_tokens) == expected


def test_should_refuse_misuse() -> None:
    """Freeing twice, sharing a free block and taking more than there is should be caught where they happen."""
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="wanted"):
        pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="shared"):
        pool.share(blocks)


def test_integrity_should_see_a_leak() -> None:
    """A block that is taken but in no table should be reported."""
    pool = BlockPool(2, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="owners"):
        pool.check_integrity([])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=60))
def test_should_balance_after_any_operations(operations: list[tuple[str, int]]) -> None:
    """Whatever is taken, shared and given back, the counts should match the tables, and giving all back frees all."""
    pool = BlockPool(8, 4)
    tables: list[list[int]] = []
    for name, size in operations:
        if name == "allocate" and size <= pool.num_free:
            tables.append(pool.allocate(size))
        elif name == "share" and tables:
            table = tables[size % len(tables)]
            pool.share(table)
            tables.append(list(table))
        elif name == "free" and tables:
            pool.free(tables.pop(size % len(tables)))
        pool.check_integrity(tables)
    for table in tables:
        pool.free(table)
    assert pool.num_free == 8
