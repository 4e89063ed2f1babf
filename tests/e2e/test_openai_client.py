"""The official `openai` client, unmodified, on a real cell: chat and completions, stream and not, sync and async."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest

MODEL = "test-llama"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 20, "temperature": 1, "seed": 3},
    "completions": {"prompt": "one two three", "max_tokens": 20, "temperature": 1, "seed": 3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n=2": {"n": 2},
    "stop": {"stop": ["e", "a"]},
}
CASES = [(kind, variant) for kind in ARGUMENTS for variant in VARIANTS]


@dataclass(slots=True)
class Seen:
    """What one call gave, the same for all four ways of calling."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: Any = None

    def add(self, index: int, text: str | None, finish: str | None) -> None:
        self.texts[index] = self.texts.get(index, "") + (text or "")
        if finish is not None:
            assert index not in self.finishes
            self.finishes[index] = finish


@pytest.fixture
def sync_client(cell: Cell) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(cell: Cell) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def _arguments(kind: str, variant: str, *, stream: bool) -> dict[str, Any]:
    streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"model": MODEL} | ARGUMENTS[kind] | VARIANTS[variant] | streaming


def _endpoint(client: Any, kind: str) -> Any:
    return client.chat.completions if kind == "chat" else client.completions


def _count(usage: Any) -> tuple[int, int] | None:
    """What all ways have in common: a later one finds more of the prompt in the cache."""
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens)


def _whole(answer: Any) -> Seen:
    seen = Seen(usage=_count(answer.usage))
    for choice in answer.choices:
        seen.add(
            choice.index, choice.message.content if hasattr(choice, "message") else choice.text, choice.finish_reason
        )
    return seen


def _note(seen: Seen, event: Any) -> None:
    seen.usage = _count(event.usage) or seen.usage
    for choice in event.choices:
        seen.add(choice.index, choice.delta.content if hasattr(choice, "delta") else choice.text, choice.finish_reason)


@pytest.mark.case(27)
@pytest.mark.parametrize(("kind", "variant"), CASES)
async def test_all_four_ways_give_the_same(
    sync_client: OpenAI, async_client: AsyncOpenAI, kind: str, variant: str
) -> None:
    """Text, finish reasons and usage should be equal, streamed and not, sync and async."""
    whole = _whole(_endpoint(sync_client, kind).create(**_arguments(kind, variant, stream=False)))
    streamed, async_streamed = Seen(), Seen()
    for event in _endpoint(sync_client, kind).create(**_arguments(kind, variant, stream=True)):
        _note(streamed, event)
    async_whole = _whole(await _endpoint(async_client, kind).create(**_arguments(kind, variant, stream=False)))
    async for event in await _endpoint(async_client, kind).create(**_arguments(kind, variant, stream=True)):
        _note(async_streamed, event)
    assert whole.usage is not None
    assert len(whole.texts) == VARIANTS[variant].get("n", 1)
    assert whole == streamed == async_whole == async_streamed


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_parse(sync_client: OpenAI, stream: bool) -> None:
    """Logprobs of both schemas should come through the client's types, one for each token with text."""
    arguments = _arguments("chat", "plain", stream=stream) | {"logprobs": True, "top_logprobs": 2}
    answer = sync_client.chat.completions.create(**arguments)
    events = answer if stream else [answer]
    content = [
        token
        for event in events
        for choice in event.choices
        if choice.logprobs
        for token in choice.logprobs.content or ()
    ]
    assert len(content) >= 1
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)
    answer = sync_client.completions.create(**_arguments("completions", "plain", stream=stream), logprobs=2)
    events = answer if stream else [answer]
    shown = [choice.logprobs for event in events for choice in event.choices if choice.logprobs]
    assert sum(len(logprobs.tokens or ()) for logprobs in shown) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", list(ARGUMENTS))
async def test_a_bad_value_is_the_clients_bad_request(
    sync_client: OpenAI, async_client: AsyncOpenAI, kind: str, stream: bool
) -> None:
    """A value out of range should raise BadRequestError with the field's name, before any stream begins."""
    arguments = _arguments(kind, "plain", stream=stream) | {"temperature": 7}
    with pytest.raises(openai.BadRequestError) as refused:
        _endpoint(sync_client, kind).create(**arguments)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        await _endpoint(async_client, kind).create(**arguments)


@pytest.mark.case(66)
async def test_closing_a_stream_cancels(cell: Cell, sync_client: OpenAI, async_client: AsyncOpenAI) -> None:
    """Closing the client's stream should end the request and free all of it."""
    arguments = _arguments("completions", "plain", stream=True) | {
        "max_tokens": 3000,
        "extra_body": {"ignore_eos": True},
    }
    stream = sync_client.completions.create(**arguments)
    next(iter(stream))
    stream.close()
    async_stream = await async_client.completions.create(**arguments)
    await anext(aiter(async_stream))
    await async_stream.close()
    await check_at_rest(cell.redis_url, cell.url, timeout_s=3)
