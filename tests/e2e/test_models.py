"""Two models in one cell, with gateways that have no model folder: each is served by its name."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
from tokenizers import Tokenizer

from quire.bench.random_model import write_random_model
from tests.e2e.cell import Cell
from tests.e2e.conftest import SMALL
from tests.faults.streams import follow
from tests.waiting import wait_until_async

PROMPT = list(range(300, 340))
A, B = "test-llama", "mirrored"
"""Of other weights each; ids stand for other texts in `mirrored`."""


@pytest.fixture(scope="module")
def mirrored_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with a tokenizer whose ids are in reverse order, and without a chat template."""
    folder = write_random_model("test", tmp_path_factory.mktemp("models") / "other", seed=8)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: len(vocab) - 1 - id_ for token, id_ in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def pair(model_folder: Path, mirrored_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """One gateway, and a worker for each of two models; tests leave it as they found it."""
    folder = tmp_path_factory.mktemp("pair")
    flags = ("--worker-lease-s=1.5", "--more-models", f"{B}={mirrored_folder}")
    running = Cell(model_folder, folder, *SMALL, *flags)
    yield running
    running.close()


def body_for(model: str, **changes: Any) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}} | changes  # fmt: skip


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of a POST, or of a GET without `body`."""
    async with session.request("GET" if body is None else "POST", url, json=body) as response:
        return response.status, await response.json()


async def names_at(session: aiohttp.ClientSession, cell: Cell) -> list[str]:
    return sorted(card["id"] for card in (await ask(session, f"{cell.url}/v1/models"))[1]["data"])


async def wait_names(session: aiohttp.ClientSession, cell: Cell, names: list[str]) -> None:
    async def are_there() -> bool:
        return await names_at(session, cell) == names

    await wait_until_async(are_there, description=f"the models {names}", timeout_s=60)


async def test_each_model_answers_under_its_name(pair: Cell, model_folder: Path, mirrored_folder: Path) -> None:
    """Each request should be read, computed and rendered by the model it names, whatever runs beside it; what names no
    model or an unknown one should be refused with the names that there are."""
    async with aiohttp.ClientSession() as session:
        assert await names_at(session, pair) == sorted([A, B])
        records = await asyncio.gather(
            *(follow(session, f"{pair.url}/v1/completions", body_for(name)) for name in (A, B, A, B))
        )
        tokenizers = {A: Tokenizer.from_file(str(model_folder / "tokenizer.json")),
                      B: Tokenizer.from_file(str(mirrored_folder / "tokenizer.json"))}  # fmt: skip
        assert [record.ending for record in records] == ["done"] * 4
        assert [record.texts for record in records[:2]] == [record.texts for record in records[2:]]
        assert records[0].texts != records[1].texts
        for name in (A, B):
            _, answer = await ask(session, f"{pair.url}/tokenize", {"model": name, "prompt": "one two three"})
            assert answer["tokens"] == tokenizers[name].encode("one two three").ids
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert (await ask(session, f"{pair.url}/v1/chat/completions", chat | {"model": A}))[0] == 200
        status, answer = await ask(session, f"{pair.url}/v1/chat/completions", chat | {"model": B})
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
        status, answer = await ask(session, f"{pair.url}/v1/chat/completions", chat)
        assert status == 400
        assert f"name one: {B}, {A}" in answer["error"]["message"]
        status, answer = await ask(session, f"{pair.url}/v1/chat/completions", chat | {"model": "huge"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert f"served: {B}, {A}" in answer["error"]["message"]


async def test_a_model_that_is_gone_leaves_the_other_alone(pair: Cell) -> None:
    """While a model's only worker is away its new requests should get 503 and those it has wait, the other model go on
    and be listed alone; what waited should end as the undisturbed stream when a worker is back."""
    async with aiohttp.ClientSession() as session:
        url = f"{pair.url}/v1/completions"
        undisturbed = await follow(session, url, body_for(B))
        old = pair.kill("worker-1", signal.SIGSTOP)
        running = asyncio.create_task(follow(session, url, body_for(B)))  # accepted, since nobody knows yet
        await wait_names(session, pair, [A])
        status, answer = await ask(session, url, body_for(B, stream=False, stream_options=None))
        assert (status, answer["error"]["code"]) == (503, "no_worker")
        assert (await follow(session, url, body_for(A))).ending == "done"
        assert (await ask(session, f"{pair.url}/ready"))[0] == 200
        assert not running.done()
        pair.kill("worker-1")
        await asyncio.to_thread(pair.wait_restarted, "worker-1", old)
        assert (await running).outcome() == undisturbed.outcome()
        await wait_names(session, pair, sorted([A, B]))


async def test_a_new_gateway_renders_a_stream_by_its_card(pair: Cell) -> None:
    """A gateway that starts while a model's worker is away should still give its streams again."""
    async with aiohttp.ClientSession() as session:
        before = await follow(session, f"{pair.url}/v1/completions", body_for(B))
        pair.kill("worker-1", signal.SIGSTOP)
        await wait_names(session, pair, [A])
        old = pair.kill("gateway-0")
        await asyncio.to_thread(pair.wait_restarted, "gateway-0", old)

        async def answers() -> bool:
            try:
                return (await ask(session, f"{pair.url}/health"))[0] == 200
            except aiohttp.ClientError:
                return False

        await wait_until_async(answers, description="the new gateway", timeout_s=60)
        again = await follow(session, f"{pair.url}/v1/streams/{before.request_id}", None)
        assert again.outcome() == before.outcome()
        assert (await ask(session, f"{pair.url}/v1/completions", body_for(B)))[0] == 503
        pair.kill("worker-1", signal.SIGCONT)
        await wait_names(session, pair, sorted([A, B]))


async def test_cards_come_back_to_an_emptied_redis(pair: Cell) -> None:
    """When Redis has lost everything workers should store their cards again, and both models be served as before."""
    async with aiohttp.ClientSession() as session:
        before = [await follow(session, f"{pair.url}/v1/completions", body_for(name)) for name in (A, B)]
        with redis.Redis.from_url(pair.redis_url) as client:
            cards = set(client.keys("card:*"))
            assert len(cards) == 2
            client.flushall()

            async def are_back() -> bool:
                return set(client.keys("card:*")) == cards

            await wait_until_async(are_back, description="the cards", timeout_s=30)

        async def serves() -> bool:
            records = [await follow(session, f"{pair.url}/v1/completions", body_for(name)) for name in (A, B)]
            return [record.texts for record in records] == [record.texts for record in before]

        await wait_until_async(serves, description="both models", timeout_s=30)
