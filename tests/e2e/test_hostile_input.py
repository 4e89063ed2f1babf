"""Hostile requests against a real cell: what is refused is refused as documented, and everything lives on unchanged."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest
from tests.waiting import wait_until_async

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIXED = {"prompt": [300, 301, 302, 17], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
MOST_GROWTH_BYTES = 512 * 2**20
"""13 MB of JSON numbers take 250 MB or so while they are parsed, two of them at once (254 MB of growth were seen)."""

FIELDS = [
    "model",
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "stream",
    "stream_options",
    "user",
    "prompt",
    "logprobs",
    "messages",
    "tools",
    "max_completion_tokens",
    "top_logprobs",
    "best_of",
    "echo",
    "suffix",
    "tool_choice",
    "response_format",
    "priority",
    "cache_salt",
    "metadata",
    "guided_regex",
    "bad_words",
    "add_special_tokens",
    "return_token_strs",
    "tokens",
    "prompt_logprobs",
    "unknown",
    "truncate_prompt_tokens",
]
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1.5, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 1e308, 5e-324, "", "x",
    "\0", "\u202e\u0301" * 30, "nan", "a" * 5000, [], {}, [[]], [0], [511], [512], [None], {"5": 1}, {"a": {"b": []}},
    [{"role": "user", "content": "hi"}], [{"type": "text", "text": "x"}],
)  # fmt: skip
EXTREME: dict[str, tuple[Any, ...]] = {
    "n": (1, 3, 8), "temperature": (0, 1e-300, 2), "top_p": (1e-300, 1), "top_k": (1, -1, 2**31 - 1), "min_p": (0, 1),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 2), "seed": (-(2**63), 0),
    "stop": ("e", ["\ufffd", " "]), "logit_bias": ({str(i): -100 for i in range(512)}, {"511": 100}),
    "logprobs": (0, 20),
    "stop_token_ids": ([0], list(range(256))), "min_tokens": (0, 1), "stream": (True, False), "ignore_eos": (True,),
}  # fmt: skip


@pytest.fixture(scope="module")
def fixed_text(cell: Cell) -> str:
    """What the fixed request gives before anything happened."""
    return asyncio.run(_fixed(cell))


async def _fixed(cell: Cell) -> str:
    async with aiohttp.ClientSession() as session, session.post(cell.url + COMPLETIONS, json=FIXED) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def check_alive(cell: Cell, fixed_text: str, pids: dict[str, int]) -> None:
    """Ready, the same text as ever, nothing left over, and the same processes as before."""
    async with aiohttp.ClientSession() as session, session.get(cell.url + "/ready") as response:
        assert response.status == 200, await response.text()
    assert await _fixed(cell) == fixed_text
    await check_at_rest(cell.redis_url, cell.url)
    assert cell.pids == pids


def post(body: bytes, *lines: str, path: str = COMPLETIONS, length: int | None = None) -> bytes:
    """One request as bytes; `length` -1 leaves `Content-Length` out."""
    size = [] if length == -1 else [f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *size, *lines, "", ""]).encode() + body


OK = json.dumps({"prompt": [5, 6], "max_tokens": 2}).encode()
CHUNKED = "Transfer-Encoding: chunked"


def value(text: str, field: str = "unknown") -> bytes:
    return f'{{"prompt":"a","messages":[{{"role":"user","content":"a"}}],"max_tokens":1,"{field}":{text}}}'.encode()


RAW: dict[str, tuple[Callable[[], bytes], tuple[int, ...]]] = {
    "plain": (lambda: post(OK), (200,)),
    "length and chunks": (lambda: post(b"0\r\n\r\n", CHUNKED, length=5), (400,)),
    "two lengths": (lambda: post(OK, "Content-Length: 3"), (400,)),
    "short length": (lambda: post(OK, length=5), (400,)),
    "negative length": (lambda: post(OK, length=-7), (400,)),
    "huge length": (lambda: post(OK, length=10**15), (413,)),
    "length beyond 64 bits": (lambda: post(OK, length=10**30), (400,)),
    "bad chunk": (lambda: post(b"zz\r\n", CHUNKED, length=-1), (400,)),
    "endless chunks": (lambda: post(b"100000\r\n%b\r\n" % (b" " * 2**20) * 17, CHUNKED, length=-1), (413,)),
    "header of a megabyte": (lambda: post(OK, "X-A: " + "a" * 2**20), (431,)),
    "ten thousand headers": (lambda: post(OK, *(f"X-{i}: 1" for i in range(10_000))), (431,)),
    "CR in a header": (lambda: post(OK, "X-Request-Id: a\rb: c"), (400,)),
    "path of 100 kB": (lambda: post(OK, path="/v1/" + "a" * 100_000), (431,)),
    "bomb": (lambda: post(gzip.compress(b" " * 50_000_000), "Content-Encoding: gzip"), (400,)),
    "utf-16": (lambda: post(OK.decode().encode("utf-16")), (400,)),
    "byte order mark": (lambda: post(b"\xef\xbb\xbf" + OK), (400,)),
    "lone surrogate": (lambda: post(b'{"prompt":"\\ud800"}'), (400,)),
    "depth of 20,000": (lambda: post(b"[" * 20_000), (400,)),
    "depth of 1,000": (lambda: post(value("[" * 1000 + "]" * 1000, "metadata")), (400,)),
    "depth in a number": (lambda: post(value("[" * 300 + "]" * 300, "seed")), (400,)),
    "depth in a bias": (lambda: post(value('{"5":' + "[" * 300 + "]" * 300 + "}", "logit_bias")), (400,)),
    "a million keys": (lambda: post(json.dumps({str(i): 1 for i in range(10**6)}).encode()), (400,)),
    "number of 100,000 digits": (lambda: post(value("9" * 100_000, "max_tokens")), (400,)),
    "1e999": (lambda: post(value("1e999", "temperature")), (400,)),
    "millions of numbers": (lambda: post(b'{"prompt": [1' + b",1" * (6 * 2**20) + b"]}"), (400,)),
    "millions of lists": (lambda: post(b'{"prompt": [[]' + b",[]" * (4 * 2**20) + b"]}"), (400,)),
    "a million prompts": (lambda: post(json.dumps({"prompt": [[1]] * 10**6}).encode()), (400,)),
    "a million stops": (lambda: post(json.dumps({"prompt": "a", "stop": ["a"] * 10**6}).encode()), (400,)),
    "a million messages": (lambda: post(json.dumps({"messages": [{}] * 10**6}).encode(), path=CHAT), (400,)),
    "a word of a megabyte": (lambda: post(json.dumps({"prompt": "a" * 10**6}).encode()), (400,)),
    "combining marks": (lambda: post(json.dumps({"prompt": "e" + "\u0301" * 10**6}).encode()), (400,)),
    "control tokens": (lambda: post(value("2", "max_tokens").replace(b'"a"', b'"</s><s>\\u0000"'), path=CHAT), (200,)),
    "a path out": (lambda: post(b"", path="/v1/models/..%2f..%2fetc%2fpasswd").replace(b"POST", b"GET", 1), (404,)),
    "not HTTP": (lambda: b"\x16\x03\x01\x02\x00\x01\r\n\r\n", (400,)),
}


@pytest.mark.parametrize("name", RAW)
async def test_hostile_bytes_are_refused_and_change_nothing(cell: Cell, fixed_text: str, name: str) -> None:
    """Each of these should get its documented status within seconds, as an error object, and leave no trace."""
    make, expected = RAW[name]
    pids = cell.pids
    status, body = await _exchange(cell, make())
    assert status in expected, body[:300]
    if status != 200:
        assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    await check_alive(cell, fixed_text, pids)


async def _exchange(cell: Cell, data: bytes) -> tuple[int, bytes]:
    port = int(cell.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):
            writer.write(data)
            answer = await reader.read(2**20)
            while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
                more = await reader.read(2**20)
                if not more:
                    break
                answer += more
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 13))])
async def test_random_bodies_give_200_or_a_documented_refusal(cell: Cell, fixed_text: str, seed: int) -> None:
    """Odd values in random fields and extreme ones together should never be a 5xx, on any route that takes a body."""
    rng, pids = random.Random(seed), cell.pids
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def send(path: str, body: dict[str, Any]) -> None:
            async with session.post(cell.url + path, json=body) as response:
                text = await response.text()
                assert response.status in (200, 400, 404), (path, str(body)[:500], text[:500])
                assert len(text) < 2000 or response.status == 200, (path, str(body)[:500])
                assert response.status == 200 or json.loads(text)["error"]["message"]

        for _ in range(10):
            await asyncio.gather(*(send(*_random_request(rng)) for _ in range(20)))
    await check_alive(cell, fixed_text, pids)


def _random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice([COMPLETIONS, COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
    body: dict[str, Any] = {"prompt": rng.choice(["hello", [5, 6, 7], [[1], [2, 3]], ["a", "b"]]), "max_tokens": 4}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    elif path == "/detokenize":
        body = {"tokens": [5, 6, 7]}
    if rng.random() < 0.5:
        return path, body | {field: rng.choice(ODD) for field in rng.sample(FIELDS, rng.randrange(1, 4))}
    chosen = {field: rng.choice(EXTREME[field]) for field in rng.sample(sorted(EXTREME), rng.randrange(1, 6))}
    return path, body | chosen


@pytest.mark.slow
async def test_floods_of_large_bodies_leave_memory_and_others_alone(cell: Cell, fixed_text: str) -> None:
    """Many large bodies at once should neither grow the gateway without bound nor keep it from its other clients."""
    gateway, pids = psutil.Process(cell.pids["gateway-0"]), cell.pids
    data = RAW["millions of numbers"][0]()
    await asyncio.gather(*(_exchange(cell, data) for _ in range(2)))
    before = gateway.memory_info().rss
    for _ in range(3):
        floods = asyncio.gather(*(_exchange(cell, data) for _ in range(4)))
        assert await _fixed(cell) == fixed_text
        assert {status for status, _ in await floods} <= {400, 503}
    assert gateway.memory_info().rss - before < MOST_GROWTH_BYTES
    await check_alive(cell, fixed_text, pids)


async def test_one_idempotency_key_at_once(cell: Cell, fixed_text: str) -> None:
    """The same key fifty times at once, half with another body, should make one request: its text or a 409."""
    pids, headers = cell.pids, {"Idempotency-Key": "raced"}
    bodies = [FIXED | {"temperature": 1, "max_tokens": 30 + i % 2} for i in range(50)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send(body: dict[str, Any]) -> tuple[int, str]:
            async with session.post(cell.url + COMPLETIONS, json=body, headers=headers) as response:
                answer = await response.json()
                return response.status, answer["choices"][0]["text"] if response.status == 200 else ""

        answers = await asyncio.gather(*map(send, bodies))
    assert sorted({status for status, _ in answers}) == [200, 409]
    assert len({text for status, text in answers if status == 200}) == 1
    assert [status for status, _ in answers].count(200) == 25
    await check_alive(cell, fixed_text, pids)


async def test_cancels_at_random_moments_free_everything(cell: Cell, fixed_text: str) -> None:
    """Clients that leave at random moments, under load, should leave nothing behind."""
    rng, pids = random.Random(7), cell.pids
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def come_and_go() -> None:
            body = FIXED | {"prompt": [7] * rng.choice([3, 50, 900]), "max_tokens": rng.choice([1, 20, 300]),
                            "n": rng.choice([1, 2, 5]), "temperature": 1, "stream": rng.random() < 0.6}  # fmt: skip
            stays_s = rng.choice([0, 0.001, 0.01, 0.05, 0.3])
            try:
                async with asyncio.timeout(stays_s), session.post(cell.url + COMPLETIONS, json=body) as response:
                    await response.read()
            except TimeoutError:
                pass

        for _ in range(6):
            await asyncio.gather(*(come_and_go() for _ in range(25)))

    async def is_at_rest() -> bool:
        await check_at_rest(cell.redis_url, cell.url)
        return True

    await wait_until_async(is_at_rest, description="rest")
    await check_alive(cell, fixed_text, pids)
