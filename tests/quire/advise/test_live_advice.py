"""Advice on live cells: set them badly, load them, hear what to set, set that, and hear no more of it.

Two pairs of cells show what a small model on a CPU can: prefix caching, block size, slots, a full KV cache and what
comes of it. The rules on a GPU's memory and on times (500 ms, 50 ms) are tried on snapshots (`test_rules.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from quire import cli
from tests.e2e.cell import Cell
from tests.faults.checker import read_metrics
from tests.faults.streams import follow

pytestmark = pytest.mark.slow

StartCell = Callable[..., Cell]
SHARED = [7 + i % 300 for i in range(48)]
MAX_LOOKS = 5


@asynccontextmanager
async def load(cell: Cell, clients: int, *, prompt_len: int, max_tokens: int) -> AsyncIterator[None]:
    """So many clients that ask again and again; prompts begin alike and end with tokens of their own."""
    serial = iter(range(10**9))

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            own = [20 + next(serial) % 400] * (prompt_len - len(SHARED))
            body = {"prompt": SHARED + own, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
            await follow(session, f"{cell.url}/v1/completions", body | {"stream_options": {"include_usage": True}})

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(ask(session)) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def look(cell: Cell, capsys: pytest.CaptureFixture[str], *, seconds: float = 2) -> dict[str, Any]:
    """What `quire advise` finds in the next seconds."""
    argv = ["advise", f"--base-url={cell.url}", f"--seconds={seconds}", "--json"]
    assert await asyncio.to_thread(cli.main, argv) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


async def look_for(cell: Cell, capsys: pytest.CaptureFixture[str], rules: set[str]) -> dict[str, Any]:
    """As `look`, until all of `rules` speak; gauges come with reports, a second or two late."""
    found: set[str] = set()
    for _ in range(MAX_LOOKS):
        document = await look(cell, capsys)
        found = {advice["rule"] for advice in document["advice"]}
        if rules <= found:
            return document
    raise AssertionError(f"after {MAX_LOOKS} looks {rules - found} are silent: {document}")


def flags_of(document: dict[str, Any], rules: set[str]) -> list[str]:
    return [flag for advice in document["advice"] if advice["rule"] in rules for flag in advice["flags"]]


async def test_prefixes_blocks_and_slots(start_cell: StartCell, capsys: pytest.CaptureFixture[str]) -> None:
    """Without prefix cache, with large blocks and two slots a cell should hear of all three; when it has done as it was
    told of none of them, find prefixes, waste less of its blocks and run more at once."""
    rules = {"prefix-cache-off", "block-size", "batch-limit"}
    bad = start_cell("--no-enable-prefix-caching", "--block-size=64", "--max-num-seqs=2")
    async with load(bad, 12, prompt_len=60, max_tokens=40):
        document = await look_for(bad, capsys, rules)
        before = await read_metrics(bad.url)
    assert [a["rule"] for a in document["advice"] if a["rule"] in rules] == [
        "prefix-cache-off", "block-size", "batch-limit",
    ]  # fmt: skip
    bad.close()
    flags = flags_of(document, rules)
    assert {"--enable-prefix-caching", "--block-size=8"} < set(flags)
    good = start_cell(*flags, "--max-num-seqs=16")  # it said twice as many as two; as often as it takes
    async with load(good, 12, prompt_len=60, max_tokens=40):
        await asyncio.sleep(2)
        document = await look(good, capsys, seconds=3)
        after = await read_metrics(good.url)
    assert not rules & {advice["rule"] for advice in document["advice"]}
    assert document["snapshot"]["num_prefix_hits"] > 0.3 * document["snapshot"]["num_prefix_queries"]
    assert after["quire:most_running"] > 2 * before["quire:most_running"]
    assert after["quire:kv_fragmentation"] < before["quire:kv_fragmentation"]


async def test_a_full_cache(start_cell: StartCell, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that is too small for what runs should be told of by preemptions and KV dtype; in int8 the same bytes
    should hold all of it, and nothing be preempted any more."""
    rules, tight = {"kv-quantization", "preemptions"}, ("--kv-cache-memory-bytes=655360", "--max-model-len=500")
    bad = start_cell(*tight)
    async with load(bad, 8, prompt_len=60, max_tokens=300):
        document = await look_for(bad, capsys, rules)
    bad.close()
    assert "--kv-cache-dtype=int8" in flags_of(document, {"kv-quantization"})
    good = start_cell(*tight, "--kv-cache-dtype=int8")
    async with load(good, 8, prompt_len=60, max_tokens=300):
        await asyncio.sleep(2)
        document = await look(good, capsys, seconds=4)
    assert not rules & {advice["rule"] for advice in document["advice"]}
    assert document["snapshot"]["num_preemptions"] == 0
    assert document["snapshot"]["num_blocks"] > 2 * 655360 / 16384
