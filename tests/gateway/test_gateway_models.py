"""A gateway without a model folder, over each bus: it serves what workers bring."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from shared.bus import Bus
from shared.model_card import pack_card, read_card
from shared.model_files import ModelFiles
from tests.faults.streams import follow
from tests.gateway.conftest import TEXT, SiteMaker
from tests.gateway.scripted_worker import ScriptedWorker
from tests.gateway.test_gateway_with_scheduler import scheduler
from tests.gateway.tiny_model import END
from tests.waiting import wait_until_async


async def test_a_gateway_without_a_folder_serves_what_lives(bus: Bus, make_site: SiteMaker, tiny_folder: Path) -> None:
    """Text, chat and lists should work from the card alone; a gateway with the folder should give the same stream
    again. Without the model's only worker its requests should be put off."""
    card = read_card(ModelFiles(model=tiny_folder))
    await bus.put_card(card.card_id, pack_card(card))
    site = await make_site(bus=bus, model="", worker={"card": card.card_id, "names": ("tiny", "alias")})
    with_folder = await make_site(bus=bus, leads=False, worker={"model": "idle", "fingerprint": "idle"})
    assert [model["id"] for model in (await site.get("/v1/models"))[1]["data"]] == ["alias", "tiny"]
    body = {"prompt": "hi", "max_tokens": 50, "temperature": 0}
    for name in (None, "tiny", "alias"):
        status, answer = await site.post("/v1/completions", body | ({"model": name} if name else {}))
        assert (status, answer["choices"][0]["text"], answer["model"]) == (200, TEXT, name or "alias")
    async with aiohttp.ClientSession() as session:
        stream = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        first = await follow(session, site.base_url + "/v1/chat/completions", stream)
        again = await follow(session, f"{with_folder.base_url}/v1/streams/{first.request_id}", None)
    assert first.texts == {0: TEXT}
    assert again.outcome() == first.outcome()
    assert b'vllm:request_success_total{finished_reason="stop",model_name="all"} 4.0' in (
        await (await site.http.get(site.base_url + "/metrics?scope=process")).read()
    )
    for worker in (site.worker, with_folder.worker):
        await worker.stop()
        await bus.bye(worker.worker_id)
    await site.app.gateway.health.poll()
    assert (await site.get("/v1/models"))[1]["data"] == []
    status, answer = await site.post("/v1/completions", body | {"model": "tiny"})
    assert (status, answer["error"]["code"]) == (503, "no_worker")


async def test_a_gateway_waits_for_the_models_it_was_told(make_site: SiteMaker) -> None:
    """With names in place of a folder it should not be ready before they are served, and refuse them for now only."""
    site = await make_site(model="", served_model_name=("x",), worker={"model": "y"})
    status, answer = await site.get("/ready")
    assert (status, answer["reasons"]) == (503, ["no live worker", "no worker has served x yet"])
    for name, code in (("x", "no_worker"), ("y", "no_worker"), ("z", "no_worker")):
        status, answer = await site.post("/v1/completions", {"model": name, "prompt": "hi"})
        assert (status, answer["error"]["code"]) == (503, code)


async def test_a_rolling_update_loses_nothing(bus: Bus, make_site: SiteMaker) -> None:
    """While workers of another kind take a name over, streams that began should end where they are, new requests go to
    the new ones, and all go on when the old ones have left."""
    site = await make_site(bus=bus, leads=False)
    old, ids = site.worker, site.tokenizer.encode("one two three").ids
    new = ScriptedWorker(
        bus, lambda body, choice: ids, site.tokenizer.token_to_id(END), fingerprint="f2", num_blocks=99
    )
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 50, "stream": True}
    async with scheduler(bus):
        old.step_s = 0.1
        running = asyncio.create_task(follow(site.http, site.base_url + "/v1/completions", body))

        async def flows() -> bool:
            return old.num_steps > 2

        await wait_until_async(flows, description="a stream")
        await new.start()
        directory = site.app.gateway.directory

        async def takes_over() -> bool:
            worker = directory.find_worker(directory.find("tiny"))
            return worker is not None and worker.worker_id == new.worker_id

        await wait_until_async(takes_over, description="the new worker")
        assert (await follow(site.http, site.base_url + "/v1/completions", body)).texts == {0: "one two three"}
        assert not running.done()
        record = await running
        assert (record.texts, record.ending) == ({0: TEXT}, "done")
        await old.stop()
        await bus.bye(old.worker_id)
        assert (await follow(site.http, site.base_url + "/v1/completions", body)).texts == {0: "one two three"}
    await new.stop()
    await bus.bye(new.worker_id)
