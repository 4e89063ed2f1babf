"""Model cards: stored once, kept while a worker names them, and few of the others."""

from __future__ import annotations

import dataclasses

from shared import keys
from shared.bus import Bus
from tests.contract.cell import TOKEN, W1, W2, Cell, make_hello


async def cards_there(bus: Bus, num_cards: int) -> list[int]:
    return [number for number in range(num_cards) if await bus.load_card(f"c{number}") is not None]


async def test_a_card_is_stored_once(bus: Bus) -> None:
    """The first data of a card should stay; one that is not there is told."""
    assert not await bus.use_card("c0")
    assert await bus.load_card("c0") is None
    await bus.put_card("c0", b"\x00first")
    await bus.put_card("c0", b"second")
    assert await bus.use_card("c0")
    assert await bus.load_card("c0") == b"\x00first"


async def test_only_the_latest_spare_cards_stay(bus: Bus) -> None:
    """Of cards that no worker names so many as are declared should stay, those used last."""
    for number in range(keys.SPARE_CARDS):
        await bus.put_card(f"c{number}", b"x")
    await bus.use_card("c0")
    for number in range(keys.SPARE_CARDS, keys.SPARE_CARDS + 2):
        await bus.put_card(f"c{number}", b"x")
    assert await cards_there(bus, keys.SPARE_CARDS + 2) == [0, *range(3, keys.SPARE_CARDS + 2)]


async def test_a_named_card_stays_with_its_worker(cell: Cell) -> None:
    """A card that a live worker names should stay, and be a spare one when the last such worker is lost or leaves."""
    await cell.bus.put_card("c0", b"x")
    for worker_id in (W1, W2):
        await cell.bus.hello(dataclasses.replace(make_hello(worker_id), card="c0"))
    for number in range(1, 9):
        await cell.bus.put_card(f"c{number}", b"x")
    assert await cards_there(cell.bus, 9) == [0, *range(9 - keys.SPARE_CARDS, 9)]
    await cell.bus.bye(W1)
    await cell.bus.put_card("c8", b"x")
    assert await cell.bus.load_card("c0") is not None
    await cell.bus.requeue(TOKEN, W2)
    await cell.bus.put_card("c8", b"x")
    assert await cell.bus.load_card("c0") is None
