"""Answers and streams: OpenAI's shapes, the official client, resuming, leaving, failing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from gateway import limits
from shared.bus import ChannelMessage, Subscribed, Subscription
from shared.ids import GatewayId
from shared.log import decode_entries
from shared.memory_bus import MemoryBus
from tests.faults.streams import StreamRecord, follow
from tests.gateway.conftest import TEXT, Site, SiteMaker
from tests.waiting import wait_until_async

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}


async def stream(site: Site, path: str, body: dict[str, Any], **options: Any) -> StreamRecord:
    return await follow(site.http, site.base_url + path, body | {"stream": True}, **options)


async def chunks_of(site: Site, path: str, body: dict[str, Any]) -> list[Any]:
    async with site.http.post(site.base_url + path, json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [orjson.loads(item) for item in data[:-1]]


async def metric(site: Site, name: str) -> float:
    async with site.http.get(site.base_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0] == name)


async def wait_for_rest(site: Site) -> None:
    """Nothing lives, runs, waits or holds blocks; each accepted request had one outcome."""

    async def at_rest() -> bool:
        gauges = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
        ended = [await metric(site, f"quire:requests_{kind}_total") for kind in ("finished", "failed", "cancelled")]
        is_idle = [await metric(site, name) for name in gauges] == [0, 0, 0]
        return is_idle and not await site.bus.list_live() and sum(ended) == await metric(
            site, "quire:requests_accepted_total")  # fmt: skip

    await wait_until_async(at_rest, description="the cell is at rest", timeout_s=5)


@pytest.mark.case(26, 64)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include_usage", [True, False])
async def test_chunks_have_openais_shape(site: Site, path: str, include_usage: bool) -> None:
    """Every choice of every chunk should have `finish_reason`; the finish chunk no text; usage come last if asked."""
    body: dict[str, Any] = {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}
    body |= {"max_tokens": 5} | ({"stream_options": {"include_usage": True}} if include_usage else {})
    chunks = await chunks_of(site, path, body)
    usage = chunks.pop() if include_usage else None
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
    else:
        assert choices[-1]["text"] == ""
    assert all(("usage" in chunk) == include_usage and chunk.get("usage") is None for chunk in chunks)
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.case(18)
async def test_completion_logprobs_zero_is_not_off(site: Site) -> None:
    """`logprobs: 0` should give the chosen tokens' logprobs and no alternatives; absence none at all."""
    _, answer = await site.post(COMPLETIONS, {"prompt": "hi", "logprobs": 0, "max_tokens": 3})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, -0.6, -0.7]
    assert logprobs["tokens"] == ["hello", " world", ","]
    assert logprobs["text_offset"] == [0, 5, 11]
    assert logprobs["top_logprobs"] is None
    _, answer = await site.post(COMPLETIONS, {"prompt": "hi", "logprobs": 2, "max_tokens": 3})
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 3
    _, answer = await site.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3})
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.case(19, 20)
@pytest.mark.parametrize("num_top", [None, 0, 2])
async def test_chat_logprobs_have_the_chat_schema(site: Site, num_top: int | None) -> None:
    """`logprobs: true` alone should be served, without alternatives; the schema be chat's, streamed too."""
    body = {"messages": USER, "logprobs": True, "max_tokens": 3} | (
        {} if num_top is None else {"top_logprobs": num_top}
    )
    _, answer = await site.post(CHAT, body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == ["hello", " world", ","]
    assert all(item.keys() == {"token", "logprob", "bytes", "top_logprobs"} for item in content)
    assert [len(item["top_logprobs"]) for item in content] == [num_top or 0] * 3
    assert bytes(content[1]["bytes"]) == b" world"
    chunks = await chunks_of(site, CHAT, body)
    streamed = [choice["logprobs"]["content"] for c in chunks for choice in c["choices"] if choice["logprobs"]]
    assert [item for part in streamed for item in part] == content


@pytest.mark.case(22, 69)
async def test_choices_have_their_own_text(site: Site) -> None:
    """Several prompts and samples should come as choices p·n + i, each whole and in order, streamed and not."""
    words = ["the cat", "hello world", "one two three", "this is", "text", "of the test there"]
    site.worker.script = lambda body, choice: site.tokenizer.encode(words[choice]).ids
    body = {"prompt": ["x", "y"], "n": 3, "seed": 7, "temperature": 1, "max_tokens": 50}
    _, answer = await site.post(COMPLETIONS, body)
    assert [choice["text"] for choice in answer["choices"]] == words
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    record = await stream(site, COMPLETIONS, body)
    assert record.texts == dict(enumerate(words))
    assert record.finishes == {index: ["stop"] for index in range(6)}


@pytest.mark.case(28)
async def test_usage_sums_over_prompts_and_choices(site: Site) -> None:
    """Usage should count each prompt once and every token of every choice, whatever finishes first."""
    site.worker.script = lambda body, choice: site.tokenizer.encode("x" * (6 - choice)).ids
    body = {"prompt": [[1, 2, 3], [4, 5], [6]], "n": 2, "max_tokens": 50}
    _, answer = await site.post(COMPLETIONS, body)
    tokens = sum(len(site.tokenizer.encode("x" * (6 - choice)).ids) + 1 for choice in range(6))
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": tokens, "total_tokens": 6 + tokens,
                               "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    record = await stream(site, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert record.usage == answer["usage"]


async def test_usage_counts_what_the_first_sample_of_each_prompt_found(site: Site) -> None:
    """Cached tokens should be those of each prompt's first choice, streamed or not: others find what it computed."""
    site.worker.num_cached = lambda choice: 100 * choice + 16
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 3}
    _, answer = await site.post(COMPLETIONS, body)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16 + 216}
    record = await stream(site, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert record.usage == answer["usage"]


@pytest.mark.case(27)
async def test_the_official_client_works(site: Site) -> None:
    """Chat and completions, streamed and not, n=2, logprobs: the client should raise nothing and give one text."""
    async with openai.AsyncOpenAI(base_url=site.base_url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        messages: Any = USER
        chat = await client.chat.completions.create(
            model="tiny", messages=messages, n=2, logprobs=True, top_logprobs=2)  # fmt: skip
        assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
        assert chat.choices[0].logprobs is not None
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == TEXT
        assert usage is not None
        assert chat.usage is not None
        assert usage.prompt_tokens == chat.usage.prompt_tokens
        completion = await client.completions.create(model="tiny", prompt="hi", max_tokens=50, logprobs=1)
        assert completion.choices[0].text == TEXT
        parts = await client.completions.create(model="tiny", prompt="hi", max_tokens=50, stream=True)
        assert "".join([part.choices[0].text async for part in parts]) == TEXT
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=[], temperature=1)
        assert caught.value.param == "messages"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=messages)


@pytest.mark.case(27)
async def test_the_official_client_works_from_a_thread(site: Site) -> None:
    """The synchronous client should give the same."""

    def use() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=site.base_url + "/v1", api_key="none", max_retries=0) as client:
            messages: Any = USER
            whole = client.chat.completions.create(model="tiny", messages=messages)
            parts = client.chat.completions.create(model="tiny", messages=messages, stream=True)
            return whole.choices[0].message.content, "".join(p.choices[0].delta.content or "" for p in parts)

    assert await asyncio.to_thread(use) == (TEXT, TEXT)


@pytest.mark.case(31)
async def test_a_stop_string_ends_the_request(bus_site: Site) -> None:
    """A stop string should end the generation too, and usage count up to the token that completes it."""
    site = bus_site
    site.says("the cat and then ", adds_end=False)
    body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stop": ["and"]}
    _, answer = await site.post(COMPLETIONS, body)
    assert answer["choices"][0]["text"] == "the cat "
    assert answer["choices"][0]["finish_reason"] == "stop"
    record = await stream(site, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert (record.texts, record.usage) == ({0: "the cat "}, answer["usage"])
    await wait_for_rest(site)


@pytest.mark.case(65)
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_failure_is_never_an_empty_success(site: Site, num_tokens: int, is_stream: bool) -> None:
    """Before the first token a failure should be a plain 5xx; after it an error event, no finish and no [DONE]."""
    site.says("cat ", adds_end=False)
    site.worker.max_drawn = num_tokens

    running = asyncio.create_task(stream(site, COMPLETIONS, LONG) if is_stream else _plain(site, LONG))

    async def has_drawn() -> bool:
        return bool(site.worker.bodies) and site.worker.num_steps >= num_tokens

    await wait_until_async(has_drawn, description="its tokens are logged")
    (request_id,) = await site.bus.list_live()
    await site.bus.end(request_id, "failed", "internal_error", "the model broke")
    record = await running
    assert record.error is not None
    assert record.error["message"] == "the model broke"
    assert record.ending == "error"
    assert record.status == (200 if is_stream and num_tokens else 500)
    assert record.finishes == {}
    assert await metric(site, "quire:requests_failed_total") == 1


async def _plain(site: Site, body: dict[str, Any]) -> StreamRecord:
    status, answer = await site.post(COMPLETIONS, body | {"stream": False})
    return StreamRecord(status=status, error=answer["error"], ending="error")


@pytest.mark.case(66)
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
async def test_a_client_that_leaves_frees_everything(bus_site: Site, is_stream: bool, stage: str) -> None:
    """Leaving while queued, before the first token and in mid-stream should end the request within 2 s."""
    site = bus_site
    site.says("cat ", adds_end=False)
    if stage == "queued":
        site.leader.is_dispatching.clear()
    site.worker.step_s = 0.01
    site.worker.max_drawn = 0 if stage == "prefill" else None
    client = asyncio.create_task(_post_and_wait(site, LONG | {"stream": is_stream}))
    await wait_until_async(lambda: _has_reached(site, stage), description=f"the request is in {stage}")
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client

    async def has_ended() -> bool:
        return not await site.bus.list_live()

    await wait_until_async(has_ended, description="the request has ended", timeout_s=2)
    site.leader.is_dispatching.set()
    site.worker.max_drawn = None
    assert await metric(site, "quire:requests_cancelled_total") == 1
    await site.worker.stop()


async def _has_reached(site: Site, stage: str) -> bool:
    if stage == "decode":
        return site.worker.num_steps > 3
    return bool(site.worker.bodies) if stage == "prefill" else bool(await site.bus.list_live())


async def _post_and_wait(site: Site, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session, session.post(site.base_url + COMPLETIONS, json=body) as response:
        await response.read()


@pytest.mark.case(68)
async def test_some_leave_and_the_others_finish(site: Site) -> None:
    """Of 20 concurrent streams half leave: the others should complete, and nothing be left."""
    site.worker.step_s = 0.01
    leavers = [stream(site, COMPLETIONS, {"prompt": "hi"}, leave_after=2) for _ in range(10)]
    stayers = [stream(site, COMPLETIONS, {"prompt": "hi", "max_tokens": 50}) for _ in range(10)]
    records = await asyncio.gather(*leavers, *stayers)
    assert [record.texts for record in records[10:]] == [{0: TEXT}] * 10
    assert all(record.ending == "done" for record in records[10:])
    await wait_for_rest(site)
    await site.check_alive()


@pytest.mark.case(69)
async def test_interleaved_streams_do_not_mix(site: Site) -> None:
    """Three streams of different lengths at once should each give all of their own tokens and end by themselves."""
    texts = {5: "the cat", 6: "hello world, this is the text", 7: "one two three"}
    site.worker.script = lambda body, choice: site.tokenizer.encode(texts[body.prompts[0][0]]).ids
    bodies = [{"prompt": [first], "max_tokens": 60} for first in texts]
    records = await asyncio.gather(*(stream(site, COMPLETIONS, body) for body in bodies))
    assert [record.texts[0] for record in records] == list(texts.values())
    for record in records:
        assert record.event_ids == sorted(set(record.event_ids))


async def test_a_stream_can_be_resumed_after_every_event(bus_site: Site) -> None:
    """From any event id on, an ended stream should give exactly the rest; from beyond its end a 400."""
    site = bus_site
    body = {"messages": USER, "n": 2, "stream_options": {"include_usage": True}, "max_tokens": 30}
    whole = await stream(site, CHAT, body)
    url = f"{site.base_url}/v1/streams/{whole.request_id}"
    for count, event_id in enumerate(whole.event_ids, 1):
        headers = {"Last-Event-ID": "{}.{}".format(*event_id)}
        rest = await follow(site.http, url, None, headers=headers)
        assert rest.event_ids == whole.event_ids[count:]
    again = await follow(site.http, url, None)
    assert again.outcome() == whole.outcome()
    last = whole.event_ids[-1][0]
    for wrong in (f"{last + 1}.0", "x"):
        assert (await site.get(f"/v1/streams/{whole.request_id}", headers={"Last-Event-ID": wrong}))[0] == 400
    for unknown in ("chatcmpl-" + "0" * 32, "nope", "%2e%2e", "chatcmpl-*"):
        assert (await site.get(f"/v1/streams/{unknown}"))[0] == 404


async def test_a_resume_beyond_a_live_log_waits(site: Site) -> None:
    """A resume that knows more than the log does should wait for the log, and give what comes after only."""
    site.worker.pace.clear()
    whole = asyncio.create_task(stream(site, COMPLETIONS, {"prompt": "hi", "max_tokens": 60}))

    async def is_live() -> bool:
        return bool(await site.bus.list_live())

    await wait_until_async(is_live, description="the request is live")
    (request_id,) = await site.bus.list_live()
    url = f"{site.base_url}/v1/streams/{request_id}"
    resumed = asyncio.create_task(follow(site.http, url, None, headers={"Last-Event-ID": "3.0"}))

    async def has_joined() -> bool:
        return site.app.gateway.relay.num_listeners == 2

    await wait_until_async(has_joined, description="the resumed stream listens")
    site.worker.pace.set()
    expected, rest = (await whole).event_ids, (await resumed).event_ids
    assert rest == [event_id for event_id in expected if event_id > (3, 0)]
    assert rest


async def test_an_idempotent_request_survives_its_client(bus_site: Site) -> None:
    """With Idempotency-Key the request should run on; the same POST gets the rest, another body a 409."""
    site = bus_site
    site.worker.step_s = 0.01
    body, headers = {"prompt": "hi", "max_tokens": 50}, {"Idempotency-Key": "k1"}
    record = await stream(site, COMPLETIONS, body, leave_after=3, headers=headers)
    first_id = record.request_id
    more = headers | {"Last-Event-ID": record.last_event_id}
    record = await stream(site, COMPLETIONS, body, headers=more, record=record)
    assert (record.texts, record.ending, record.request_id) == ({0: TEXT}, "done", first_id)
    assert record.event_ids == sorted(set(record.event_ids))
    assert (await site.post(COMPLETIONS, body | {"max_tokens": 2}, headers=headers))[0] == 409
    await wait_for_rest(site)


async def test_an_idempotency_key_belongs_to_its_route(site: Site) -> None:
    """A body that both routes take should be another request on the other route: 409."""
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"Idempotency-Key": "k2"}
    assert (await site.post(COMPLETIONS, body, headers=headers))[0] == 200
    assert (await site.post(CHAT, body, headers=headers))[0] == 409


class LossyBus(MemoryBus):
    """A memory bus whose publications are changed by `distort` on their way."""

    def __init__(self, distort: Callable[[list[ChannelMessage]], list[ChannelMessage]]) -> None:
        super().__init__()
        self.distort = distort

    def subscribe(self, gateway_id: GatewayId) -> Subscription:
        return _LossySubscription(super().subscribe(gateway_id), self)


class _LossySubscription:
    def __init__(self, inner: Subscription, bus: LossyBus) -> None:
        self._inner = inner
        self._bus = bus

    async def next(self, timeout_s: float) -> list[ChannelMessage] | Subscribed | None:
        heard = await self._inner.next(timeout_s)
        return self._bus.distort(heard) if isinstance(heard, list) else heard

    async def close(self) -> None:
        await self._inner.close()


async def test_lost_publications_are_read_from_the_log(make_site: SiteMaker) -> None:
    """Publications that never come, or come twice or late, should change nothing: the log is the truth."""
    number = 0
    late: list[ChannelMessage] = []

    def distort(messages: list[ChannelMessage]) -> list[ChannelMessage]:
        nonlocal number
        number += 1
        if number % 5 == 0:
            late.extend(messages)
        if number % 5 == 0 or number % 3 == 0:
            return []
        found = messages * (1 + number % 2) + late
        late.clear()
        return found

    site = await make_site(bus=LossyBus(distort))
    records = await asyncio.gather(*(stream(site, COMPLETIONS, {"prompt": "hi", "max_tokens": 60}) for _ in range(5)))
    assert [record.texts for record in records] == [{0: TEXT}] * 5
    assert all(record.ending == "done" for record in records)


async def test_a_lost_last_message_is_found_within_seconds(make_site: SiteMaker) -> None:
    """With no publication at all the stream should still be whole: silence makes the gateway look."""
    site = await make_site(bus=LossyBus(lambda messages: []))
    async with asyncio.timeout(4):
        record = await stream(site, COMPLETIONS, {"prompt": "hi", "max_tokens": 60})
    assert (record.texts, record.ending) == ({0: TEXT}, "done")


async def test_a_listener_that_is_not_read_stays_small(site: Site) -> None:
    """What comes while a client does not read should cost a bounded buffer, and all be read from the log later."""
    site.says("cat ", adds_end=False)
    body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "n": 20, "logprobs": 20}
    posted = asyncio.create_task(site.post(COMPLETIONS, body))

    async def is_live() -> bool:
        return bool(await site.bus.list_live())

    await wait_until_async(is_live, description="the request is live")
    (request_id,) = await site.bus.list_live()
    listener = site.app.gateway.relay.listen(request_id)
    assert (await posted)[0] == 200
    log = await site.bus.read_log(request_id)
    assert len(log) > 4 * limits.MAX_BUFFERED_BYTES
    assert listener.num_buffered <= limits.MAX_BUFFERED_BYTES
    listener.refill()
    entries = await listener.read()
    while listener.ended is None:
        entries += await listener.read()
    assert entries == decode_entries(log)
    listener.close()
    assert site.app.gateway.relay.num_listeners == 0


async def test_keep_alive_opens_the_stream_early(make_site: SiteMaker) -> None:
    """With --sse-keep-alive-s the stream should open before the first token and carry comments while nothing comes."""
    site = await make_site(sse_keep_alive_s=0.05)
    site.leader.is_dispatching.clear()
    async with site.http.post(site.base_url + COMPLETIONS, json={"prompt": "hi", "stream": True}) as response:
        for _ in range(3):
            assert await response.content.readline() == b": keep-alive\n"
            await response.content.readline()
        site.leader.is_dispatching.set()
        assert (await response.text()).endswith("data: [DONE]\n\n")
