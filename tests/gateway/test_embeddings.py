"""POST /v1/embeddings: OpenAI's shape, what is refused, and that an embedding is a durable request like any other."""

from __future__ import annotations

import asyncio
import base64
from array import array
from typing import Any

import pytest
from openai import AsyncOpenAI

from gateway.limits import MAX_PROMPTS
from shared.bus import Bus
from shared.ids import RequestId
from tests.gateway.conftest import Site, SiteMaker
from tests.waiting import wait_until_async

EMBEDDINGS = "/v1/embeddings"


def vectors_of(answer: dict[str, Any]) -> list[list[float]]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["embedding"] for item in answer["data"]]


async def test_each_kind_of_input_is_embedded(bus_site: Site) -> None:
    """A string, strings, ids and lists of ids should each give a vector in order; usage counts prompt tokens only."""
    site = bus_site
    hello, bye = site.tokenizer.encode("hello world").ids, site.tokenizer.encode("one two").ids
    for given, prompts in (
        ("hello world", [hello]),
        (["hello world", "one two"], [hello, bye]),
        (hello, [hello]),
        ([bye, hello], [bye, hello]),
    ):
        status, answer = await site.post(EMBEDDINGS, {"model": "tiny", "input": given})
        assert status == 200, answer
        assert vectors_of(answer) == [[len(prompt), prompt[-1]] for prompt in prompts]
        total = sum(map(len, prompts))
        assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
        assert (answer["object"], answer["model"], answer["id"][:5]) == ("list", "tiny", "embd-")
        record = await site.bus.load_record(RequestId(answer["id"]))
        assert record is not None
        assert record.ended is not None
        assert (record.ended.prompt_tokens, record.ended.completion_tokens) == (total, 0)
    await site.check_alive()


async def test_numbers_come_as_floats_or_base64(site: Site) -> None:
    """base64 should hold the same little-endian float32 numbers; the official client asks for that by itself."""
    site.worker.embed = lambda prompt: [0.1, -2.5, 3e-8]
    _, plain = await site.post(EMBEDDINGS, {"input": "hi", "encoding_format": "float"})
    _, packed = await site.post(EMBEDDINGS, {"input": "hi", "encoding_format": "base64"})
    (numbers,), (text,) = vectors_of(plain), vectors_of(packed)
    assert array("f", base64.b64decode(str(text))).tolist() == numbers == array("f", [0.1, -2.5, 3e-8]).tolist()
    async with AsyncOpenAI(base_url=f"{site.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model="tiny", input=["hi", "one two"])
    assert [item.embedding for item in answer.data] == [numbers, numbers]


@pytest.mark.parametrize(("body", "param"), [
    ({}, "input"), ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": ["a", ""]}, "input"),
    ({"input": [[]]}, "input"), ({"input": [1, "a"]}, "input"), ({"input": {"a": 1}}, "input"),
    ({"input": [100_000]}, "input"), ({"input": ["a"] * (MAX_PROMPTS + 1)}, "input"), ({"input": [1] * 512}, "input"),
    ({"input": "a " * 2000}, "input"), ({"input": "a", "dimensions": 2}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"), ({"input": "a", "pooling": "mean"}, "pooling"),
    ({"input": "a", "normalize": False}, "normalize"), ({"input": "a", "truncate_prompt_tokens": 3},
                                                        "truncate_prompt_tokens")])  # fmt: skip
async def test_what_is_wrong_or_not_built_is_refused(site: Site, body: dict[str, Any], param: str) -> None:
    """Each should be a 400 that names the field, and leave nothing behind."""
    status, answer = await site.post(EMBEDDINGS, {"model": "tiny"} | body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    await site.check_alive()


async def test_the_longest_input_leaves_room_for_a_token(site: Site) -> None:
    """An input of one token less than the context should be embedded; an unknown model refused."""
    status, answer = await site.post(EMBEDDINGS, {"input": [1] * 511})
    assert (status, vectors_of(answer)) == (200, [[511, 1]])
    assert (await site.post(EMBEDDINGS, {"model": "huge", "input": "a"}))[0] == 404


async def test_an_embedding_is_durable(bus: Bus, make_site: SiteMaker) -> None:
    """The same POST with its key should join a request that runs; any gateway should give an ended one again, whole.
    A client that leaves should end its request."""
    site = await make_site(bus=bus)
    site.worker.pace.clear()
    headers = {"Idempotency-Key": "e1"}
    body = {"input": ["hello", "world"], "encoding_format": "base64"}
    first = asyncio.create_task(site.post(EMBEDDINGS, body, headers=headers))

    async def runs() -> bool:
        return bool(site.worker.bodies)

    await wait_until_async(runs, description="the request")
    second = asyncio.create_task(site.post(EMBEDDINGS, body, headers=headers))
    site.worker.pace.set()
    answers = [await first, await second]
    assert answers[0] == answers[1]
    assert len(site.worker.bodies) == 1
    other = await make_site(bus=bus, leads=False, worker={"model": "idle", "fingerprint": "idle"})
    assert await other.get(f"/v1/streams/{answers[0][1]['id']}") == answers[0]

    site.worker.pace.clear()
    left = asyncio.create_task(site.post(EMBEDDINGS, {"input": "hi"}))

    async def runs_too() -> bool:
        return len(site.worker.bodies) == 2

    await wait_until_async(runs_too, description="another request")
    left.cancel()

    async def has_ended() -> bool:
        return not await bus.list_live()

    await wait_until_async(has_ended, description="its end")
    site.worker.pace.set()
    for worker in (site.worker, other.worker):
        await worker.stop()
        await bus.bye(worker.worker_id)
