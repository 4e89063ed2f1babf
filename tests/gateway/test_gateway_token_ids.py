"""`return_token_ids`: prompt and output as token ids, streamed and not, and what ended each choice."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.gateway.conftest import TEXT, Site
from tests.gateway.tiny_model import END

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "end token": {"max_tokens": 50},
    "length": {"max_tokens": 3},
    "stop string": {"max_tokens": 50, "stop": ["is the"]},
    "held back": {"max_tokens": 50, "stop": ["world, this is no"]},
    "stop token": {"max_tokens": 50, "n": 2},
    "logprobs": {"max_tokens": 50, "stop": ["is the"], "logprobs": 2},
}


async def frames_of(site: Site, path: str, body: dict[str, Any] | None, **options: Any) -> list[tuple[str, str]]:
    """(id, data) of each event of a stream; `body` None: of a GET."""
    call = site.http.get if body is None else site.http.post
    json = {} if body is None else {"json": body | {"stream": True}}
    async with call(site.base_url + path, **json, **options) as response:
        blocks = (await response.text()).strip().split("\n\n")
    pairs = [block.split("\n") for block in blocks if block]
    return [(head.removeprefix("id: "), data.removeprefix("data: ")) for head, data in pairs]


def join(frames: list[tuple[str, str]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream put together, as the whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for _, data in frames:
        chunk = None if data == "[DONE]" else orjson.loads(data)
        for part in chunk["choices"] if chunk else ():
            choice = choices.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": 0, "end": None})
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
            choice["token_ids"] += part["token_ids"]
            choice["logprobs"] += _num_logprobs(part)
            prompt_ids = part.get("prompt_token_ids", chunk.get("prompt_token_ids"))
            if prompt_ids is not None:
                assert "prompt_token_ids" not in choice
                choice["prompt_token_ids"] = prompt_ids
            if part["finish_reason"]:
                choice["end"] = (part["finish_reason"], part["stop_reason"])
    return choices


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of an answer that was not streamed."""
    return {
        choice["index"]: {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "token_ids": choice["token_ids"],
            "logprobs": _num_logprobs(choice),
            "end": (choice["finish_reason"], choice["stop_reason"]),
            "prompt_token_ids": choice.get("prompt_token_ids", answer.get("prompt_token_ids")),
        }
        for choice in answer["choices"]
    }


def _num_logprobs(choice: dict[str, Any]) -> int:
    logprobs = choice["logprobs"] or {}
    return len(logprobs.get("tokens") or logprobs.get("content") or ())


def _body(path: str, variant: str, site: Site) -> dict[str, Any]:
    body = PROMPTS[path] | VARIANTS[variant] | {"return_token_ids": True}
    if variant == "stop token":
        body["stop_token_ids"] = [site.tokenizer.encode(TEXT).ids[4]]
    if variant == "logprobs" and path == CHAT:
        body |= {"logprobs": True, "top_logprobs": 2}
    return body


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", PROMPTS)
async def test_stream_and_answer_hold_the_same_ids(site: Site, path: str, variant: str) -> None:
    """Prompt ids, output ids, texts and endings should be equal, streamed and not; the ids those that were drawn."""
    body = _body(path, variant, site)
    drawn = [*site.tokenizer.encode(TEXT).ids, site.tokenizer.token_to_id(END)]
    status, answer = await site.post(path, body)
    assert status == 200
    choices = whole(answer)
    assert choices == join(await frames_of(site, path, body))
    assert set(choices) == set(range(body.get("n", 1)))
    end = {"length": ("length", None), "stop token": ("stop", drawn[4]), "stop string": ("stop", "is the")}
    for choice in choices.values():
        assert choice["token_ids"] == drawn[: len(choice["token_ids"])]
        assert choice["end"] == end.get("stop string" if variant == "logprobs" else variant, ("stop", None))
        if path == COMPLETIONS:
            assert choice["prompt_token_ids"] == site.tokenizer.encode("hi").ids
        assert choice["prompt_token_ids"]
        assert choice["logprobs"] == (len(choice["token_ids"]) if variant == "logprobs" else 0)
    num_tokens = sum(len(choice["token_ids"]) for choice in choices.values())
    assert answer["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("variant", ["end token", "held back", "logprobs"])
@pytest.mark.parametrize("path", PROMPTS)
async def test_a_resumed_stream_is_the_same(site: Site, path: str, variant: str) -> None:
    """From any event on a second reader should get the very bytes that the first one got, under the same ids."""
    body = _body(path, variant, site)
    frames = await frames_of(site, path, body)
    request_id = orjson.loads(frames[0][1])["id"]
    for number, (event_id, _) in enumerate(frames):
        rest = await frames_of(site, f"/v1/streams/{request_id}", None, headers={"Last-Event-ID": event_id})
        assert rest == frames[number + 1 :]


async def test_each_choice_names_its_own_prompt(site: Site) -> None:
    """Choices of several prompts should each hold the ids of theirs, also where the best of several are given."""
    site.worker.logprob = lambda choice, position: -float(choice)
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 1, "best_of": 2, "max_tokens": 2, "return_token_ids": True}
    _, answer = await site.post(COMPLETIONS, body)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 2, 3], [4, 5]]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2, 2]


@pytest.mark.parametrize("path", PROMPTS)
async def test_without_it_nothing_is_added(site: Site, path: str) -> None:
    """Answers and chunks should have OpenAI's fields only, unless ids were asked for."""
    _, answer = await site.post(path, PROMPTS[path] | {"max_tokens": 3})
    chunks = [orjson.loads(data) for _, data in (await frames_of(site, path, PROMPTS[path] | {"max_tokens": 3}))[:-1]]
    ours = {"token_ids", "prompt_token_ids", "stop_reason"}
    for item in (answer, *chunks):
        assert not ours & item.keys()
        assert not any(ours & choice.keys() for choice in item["choices"])


async def test_logprobs_name_tokens_by_id(site: Site) -> None:
    """`return_tokens_as_token_ids` should write `token_id:N` where logprobs name a token, in both schemas."""
    ids = site.tokenizer.encode(TEXT).ids[:2]
    asked = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    _, answer = await site.post(COMPLETIONS, PROMPTS[COMPLETIONS] | asked | {"logprobs": 1})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{id_}" for id_ in ids]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    _, answer = await site.post(CHAT, PROMPTS[CHAT] | asked | {"logprobs": True, "top_logprobs": 1})
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == [f"token_id:{id_}" for id_ in ids]
    assert bytes(content[0]["bytes"]) == b"hello"
