"""The door of a whole cell: what never fits, what is too much, and counts that are right whatever became of whom."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Callable
from typing import Any

import aiohttp
import psutil
import pytest
import redis.asyncio

from shared import keys
from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, read_metrics
from tests.waiting import wait_until_async

COMPLETIONS = "/v1/completions"
BYTES_PER_TOKEN = 512
"""Of KV: 2 layers, keys and values, 2 heads of 16, in float32."""
MANY = 1_000_000
MOST_GROWTH_BYTES = 50 * 2**20


async def ask(url: str, session: aiohttp.ClientSession | None = None, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of a completion."""
    if session is None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as own:
            return await ask(url, own, **fields)
    body = {"prompt": [17, 250, 33], "max_tokens": 3, "ignore_eos": True, "temperature": 0} | fields
    async with session.post(url + COMPLETIONS, data=io.BytesIO(json.dumps(body).encode())) as response:
        return response.status, await response.json(), dict(response.headers)


@pytest.mark.case(71)
async def test_what_never_fits_is_refused_and_blocks_nobody(start_cell: Callable[..., Cell]) -> None:
    """In a pool of 8 blocks of 16 (a worker takes no model length beyond its pool) a prompt of 200 tokens should be a
    400 at once, and a short one be served; so should what just fits, choice by choice."""
    cell = start_cell("--block-size=16", f"--kv-cache-memory-bytes={8 * 16 * BYTES_PER_TOKEN}", "--max-model-len=128")

    async def has_eight_blocks() -> bool:
        return (await read_metrics(cell.url))["quire:num_blocks"] == 8

    await wait_until_async(has_eight_blocks, description="the worker reports its 8 blocks")
    for stream in (False, True):
        status, answer, _ = await ask(cell.url, prompt=[5] * 200, stream=stream)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "128" in answer["error"]["message"]
        status, answer, _ = await ask(cell.url, max_tokens=5)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    assert (await ask(cell.url, prompt=[5] * 120, max_tokens=9))[0] == 400
    assert (await ask(cell.url, prompt=[5] * 120, max_tokens=8, n=3))[0] == 200
    await check_at_rest(cell.redis_url, cell.url)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "min_tokens of 2**31": ({"min_tokens": 2**31}, "min_tokens"),
    "min_tokens over max_tokens": ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    "negative min_tokens": ({"min_tokens": -1}, "min_tokens"),
    **{f"{field} of {value}": ({field: value}, field) for field in ("n", "best_of")
       for value in (0, -1, 129, 10**9, 1.5, True)},
    **{f"priority of {value}": ({"priority": value}, "priority") for value in (2**31 + 1, 10**30, 0.5, True, "1")},
    "a long user": ({"user": "x" * 10**6}, "user"),
    "a million biases": ({"logit_bias": {str(i): 1 for i in range(MANY)}}, "logit_bias"),
    "a million bad words": ({"bad_words": ["x"] * MANY}, "bad_words"),
    "a million stop ids": ({"stop_token_ids": [1] * MANY}, "stop_token_ids"),
    "100,000 prompts": ({"prompt": [[1]] * 100_000}, "prompt"),
    "200 prompts, best_of 2": ({"prompt": [[1]] * 200, "best_of": 2}, "best_of"),
}  # fmt: skip


@pytest.mark.case(80, 102, 103)
async def test_extreme_values_are_refused_and_freeze_nothing(cell: Cell) -> None:
    """Each should be a 400 that names the field, whether streamed or not, and leave the engine stepping; counts of
    choices should cost no memory."""
    _, before, _ = await ask(cell.url)
    gateway = psutil.Process(cell.pids["gateway-0"])
    rss = gateway.memory_info().rss
    for what, (fields, param) in REFUSED.items():
        for stream in (False, True):
            status, answer, _ = await ask(cell.url, **fields, stream=stream)
            assert (status, answer["error"]["param"] or param) == (400, param), (what, answer)
        if what == "best_of of True":
            assert gateway.memory_info().rss - rss < MOST_GROWTH_BYTES
    _, after, _ = await ask(cell.url)
    assert after["choices"] == before["choices"]
    await check_at_rest(cell.redis_url, cell.url)


async def test_best_of_chooses_among_the_same_samples(cell: Cell) -> None:
    """`best_of` should answer with those of the `n` samples of the same seed that have the best mean logprob."""
    sampled = {"temperature": 1, "seed": 7, "max_tokens": 12}
    _, every, _ = await ask(cell.url, **sampled, n=6, logprobs=0)
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in every["choices"]]
    ranked = sorted(range(6), key=lambda index: -means[index])
    _, best, _ = await ask(cell.url, **sampled, n=3, best_of=6)
    assert [c["text"] for c in best["choices"]] == [every["choices"][index]["text"] for index in ranked[:3]]
    assert [c["logprobs"] for c in best["choices"]] == [None] * 3
    assert best["usage"] == every["usage"]


async def test_a_full_queue_is_503_until_it_moves(start_cell: Callable[..., Cell]) -> None:
    """With one slot, and two requests waiting, a third should be a 503 with Retry-After; later it should be served."""
    cell = start_cell("--max-num-seqs=1", "--max-num-queued-reqs=2")
    sent: list[asyncio.Task[Any]] = []
    client = redis.asyncio.from_url(cell.redis_url)

    async def is_refused() -> bool:
        """Sends one more when the last one is stored."""
        if await client.scard(keys.LIVE) == len(sent) and not any(task.done() for task in sent):
            sent.append(asyncio.create_task(ask(cell.url, max_tokens=2000)))
        return any(task.done() for task in sent)

    await wait_until_async(is_refused, description="one is refused")
    await client.aclose()
    *served, refused = await asyncio.gather(*sent)
    assert (refused[0], refused[1]["error"]["code"]) == (503, "overloaded")
    assert 1 <= int(refused[2]["Retry-After"]) <= 60
    assert [status for status, _, _ in served] in (
        [200] * 3,
        [200] * 4,
    )  # a worker is sent one more than it has room for
    assert (await read_metrics(cell.url))["quire:requests_refused_total"] == 1
    assert (await ask(cell.url))[0] == 200
    await check_at_rest(cell.redis_url, cell.url)


async def test_a_minute_is_one_over_all_gateways(start_cell: Callable[..., Cell]) -> None:
    """Of many requests through two gateways at once exactly the limit's number should be served, the rest be 429."""
    cell = start_cell("--gateways=2", "--tenant-requests-per-minute=7")
    urls = cell.state["urls"]
    answers = await asyncio.gather(*(ask(urls[i % 2]) for i in range(30)))
    assert sorted(status for status, _, _ in answers) == [200] * 7 + [429] * 23
    refused = [(answer["error"]["code"], headers) for status, answer, headers in answers if status == 429]
    assert {code for code, _ in refused} == {"rate_limit_exceeded"}
    assert all(1 <= int(headers["Retry-After"]) <= 9 for _, headers in refused)

    async def is_let_in() -> bool:
        return (await ask(urls[0]))[0] == 200

    await wait_until_async(is_let_in, description="the bucket holds a request again", timeout_s=12)


@pytest.mark.case(77)
async def test_counts_are_right_after_five_hundred_fates(start_cell: Callable[..., Cell]) -> None:
    """While 500 requests finish, leave, are refused and preempted, the counts should come back to those of the one that
    stays each time, and to nothing when it ends; the next request should be admitted at once."""
    cell = start_cell("--kv-cache-memory-bytes=1536000", "--max-model-len=2100", "--admission-headroom=0",
                      "--tenant-max-in-flight=400", "--tenant-tokens-per-minute=1000000000")  # fmt: skip
    rng, num_stayed = random.Random(11), 0
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        redis.asyncio.from_url(cell.redis_url) as client,
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session,
    ):
        stays = await _stay(session, cell)
        for _ in range(10):
            await asyncio.gather(*(_come_and_go(session, cell, rng) for _ in range(50)))
            num_stayed += await _settle(client)
            stayed, stays = stays, await _stay(session, cell)
            stayed.close()
        stays.close()
    assert num_stayed > 0
    await check_at_rest(cell.redis_url, cell.url, timeout_s=20)
    assert (await read_metrics(cell.url))["vllm:num_preemptions_total"] > 0
    assert (await ask(cell.url))[0] == 200


async def _stay(session: aiohttp.ClientSession, cell: Cell) -> aiohttp.ClientResponse:
    """A stream that outlives the others."""
    body = {"prompt": [9] * 10, "max_tokens": 2000, "ignore_eos": True, "stream": True, "priority": -(2**31)}
    response = await session.post(cell.url + COMPLETIONS, json=body)
    assert (await response.content.readline()).startswith(b"id: ")
    return response


async def _come_and_go(session: aiohttp.ClientSession, cell: Cell, rng: random.Random) -> None:
    body: dict[str, Any] = {
        "prompt": [rng.randrange(10, 500)] * rng.choice([3, 60, 400]),
        "max_tokens": rng.choice([1, 5, 200]),
        "n": rng.choice([1, 1, 3]),
        "stream": rng.random() < 0.5,
        "priority": rng.randrange(-2, 3),
        "ignore_eos": True,
    }
    body |= {"best_of": 4, "stream": False} if rng.random() < 0.1 else {}
    body |= {"temperature": 9} if rng.random() < 0.1 else {}
    stays_s = rng.choice([0.001, 0.02, 0.2, 1, 60])
    try:
        async with asyncio.timeout(stays_s), session.post(cell.url + COMPLETIONS, json=body) as response:
            assert response.status in (200, 400), await response.text()
            await response.read()
    except TimeoutError:
        assert stays_s < 60, "a request was never served"


async def _settle(client: Any) -> int:
    """Live requests once their counts are those of one that runs, or, when it has ended, of none."""
    counts: list[Any] = []

    async def is_settled() -> bool:
        async with client.pipeline(transaction=True) as at_once:
            counts[:] = await at_once.scard(keys.LIVE).hgetall(keys.IN_FLIGHT).hgetall(keys.QUEUE).execute()
        one = [1, {b"anyone": b"1"}, {b"sequences": b"0", b"tokens": b"0"}]
        return counts in (one, [0, {}, {}])

    try:
        await wait_until_async(is_settled, description="the counts of one request")
    except AssertionError as error:
        raise AssertionError(f"{error}: {counts}") from None
    return int(counts[0])
