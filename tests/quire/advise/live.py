"""Loads on a live cell, and what `quire advise` finds under them."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import aiohttp

from quire import cli
from tests.e2e.cell import Cell
from tests.faults.streams import follow

SHARED = [7 + i % 300 for i in range(48)]
MAX_LOOKS = 6
"""Of `LOOK_S` each; of shorter ones as many more."""
LOOK_S = 1.5
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many clients that ask again and again; `body` makes the request of a number, each number once."""

    clients: int
    body: Callable[[int], dict[str, Any]]


def complete(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request for so many tokens in one answer: this process, which shares the machine with the cell, must not be
    what the cell waits for."""
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | fields


def sharing(number: int, length: int) -> list[int]:
    """A prompt that begins as all of these do, and ends with tokens of its own."""
    return SHARED + [20 + number % 400] * (length - len(SHARED))


def strange(number: int, length: int) -> list[int]:
    """A prompt that begins as no other does."""
    return [20 + number % 400, 20 + number // 400] * (length // 2)


def flags_of(document: Document, *rules: str) -> list[str]:
    """What these rules say to set."""
    return [flag for advice in document["advice"] if advice["rule"] in rules for flag in advice["flags"]]


def rules_of(document: Document) -> set[str]:
    return {advice["rule"] for advice in document["advice"]}


async def look(cell: Cell, *flags: str, seconds: float = LOOK_S) -> Document:
    """What `quire advise FLAGS` finds in the next seconds."""
    argv = ["advise", f"--base-url={cell.url}", f"--seconds={seconds}", "--json", *flags]
    with redirect_stdout(io.StringIO()) as shown:
        assert await asyncio.to_thread(cli.main, argv) == 0
    document: Document = json.loads(shown.getvalue())
    return document


async def hear(
    cell: Cell, load: Load, *flags: str, speak: Iterable[str] = (), rest: Iterable[str] = (),
    until: Callable[[Document], bool] = bool, seconds: float = LOOK_S,
) -> Document:  # fmt: skip
    """What is found under `load` as soon as all rules of `speak` speak, none of `rest` does, `until` holds and
    requests have ended; after many looks whatever is found then. Gauges come with reports, a second or two late, and
    show a moment."""
    async with under(cell, load):
        for _ in range(round(MAX_LOOKS * LOOK_S / seconds)):
            document = await look(cell, *flags, seconds=seconds)
            found, has_ended = rules_of(document), document["snapshot"]["num_ended"] > 0
            if found.issuperset(speak) and found.isdisjoint(rest) and has_ended and until(document):
                break
    return document


@asynccontextmanager
async def under(cell: Cell, load: Load) -> AsyncIterator[None]:
    """While this lasts."""
    numbers = itertools.count()

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            record = await follow(session, f"{cell.url}/v1/completions", load.body(next(numbers)))
            assert record.status == 200, record.error

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(ask(session)) for _ in range(load.clients)]
        try:
            yield
            failed = [task.exception() for task in tasks if task.done()]
            assert not failed, failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
