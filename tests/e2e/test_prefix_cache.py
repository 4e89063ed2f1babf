"""The prefix cache as a client sees it: usage, and who can tell what others asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.cell import Cell
from tests.faults.checker import read_metrics
from tests.waiting import wait_until_async

PROMPT = [(11 * i) % 500 for i in range(100)]


async def complete(cell: Cell, key: str = "", **fields: Any) -> tuple[str, int]:
    """The greedy text, and how many tokens of the prompt were cached."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(cell.url + "/v1/completions", json=body, headers=headers) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.case(81)
async def test_a_hit_changes_no_text(start_cell: Callable[..., Cell]) -> None:
    """A prompt, the same again, and one that goes on behind it should give what they give without a cache, and the
    second and third should find what the first computed."""
    plain, caching = start_cell("--no-enable-prefix-caching"), start_cell()
    longer = {"prompt": [*PROMPT, 7, 8, 9]}
    expected = [(await complete(plain, **fields)) for fields in ({}, {}, longer)]
    found = [(await complete(caching, **fields)) for fields in ({}, {}, longer)]
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [cached for _, cached in expected] == [0, 0, 0]
    assert [cached for _, cached in found] == [0, 96, 96]

    async def are_counted() -> bool:
        metrics = await read_metrics(caching.url)
        counted = [metrics[f"vllm:prefix_cache_{name}_total"] for name in ("queries", "hits")]
        return counted == [303, 192]

    await wait_until_async(are_counted, description="the cache's counters in a report")


@pytest.mark.case(85)
async def test_nobody_finds_what_is_not_theirs(start_cell: Callable[..., Cell]) -> None:
    """Another key, or another salt, should find nothing of a prompt that was computed; the same ones should."""
    cell = start_cell("--api-key", "one", "two")
    assert (await complete(cell, "one"))[1] == 0
    assert (await complete(cell, "two"))[1] == 0
    assert (await complete(cell, "two", cache_salt="s"))[1] == 0
    assert (await complete(cell, "one", cache_salt="s"))[1] == 0
    assert (await complete(cell, "one", cache_salt="t"))[1] == 0
    assert (await complete(cell, "one", cache_salt="s"))[1] == 96
    assert (await complete(cell, "one"))[1] == 96


async def test_prompts_go_where_their_prefix_is(start_cell: Callable[..., Cell]) -> None:
    """With two workers, prompts that go on behind a known one should all find it, since they are sent to its worker;
    they are long, so that a request of which the scheduler does not know yet that it has ended weighs less."""
    cell = start_cell("--workers=2", "--num-threads=1")
    known = [[(step * i) % 500 for i in range(400)] for step in (11, 13)]
    for prompt in known:
        assert (await complete(cell, prompt=prompt))[1] == 0

    async def are_reported() -> bool:
        return (await read_metrics(cell.url))["vllm:prefix_cache_queries_total"] == 800

    await wait_until_async(are_reported, description="reports of both prompts")
    for turn in range(6):
        for prompt in known:
            assert (await complete(cell, prompt=[*prompt, turn, 7]))[1] == 400
