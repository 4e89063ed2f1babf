"""What a request may hold: each wrong field is a 400 that names it, decided before anything is stored."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import orjson
import pytest

from gateway import limits
from gateway.openai import parse_json
from shared.errors import InvalidRequest
from tests.gateway.conftest import TEXT, Site, SiteMaker

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def refused(site: Site, path: str, body: dict[str, Any], *, param: str | None = None) -> dict[str, Any]:
    """The error object of a request that must be refused with 400, streaming or not, and store nothing."""
    error: dict[str, Any] = {}
    for stream in (False, True):
        data = io.BytesIO(json.dumps(body | {"stream": stream}).encode())
        async with site.http.post(site.base_url + path, data=data) as response:
            assert response.status == 400, await response.text()
            assert response.content_type == "application/json"
            error = (await response.json())["error"]
        assert error["type"] == "invalid_request_error"
        assert error.keys() == {"message", "type", "param", "code"}
        if param is not None:
            assert error["param"] == param
    assert await site.bus.list_live() == set()
    return error


@pytest.mark.case(3)
@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, 5, {}, [None], [["a"]], [[1], "x", []], "absent"])
async def test_an_empty_or_shapeless_prompt_is_refused(site: Site, prompt: Any) -> None:
    """A prompt without tokens, or of another shape, should be a 400 that names `prompt`."""
    body = {} if prompt == "absent" else {"prompt": prompt}
    await refused(site, COMPLETIONS, body, param="prompt")
    await site.check_alive()


@pytest.mark.case(3)
@pytest.mark.parametrize("messages", [[], None, "hi", [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}],
                                      [{"role": "user", "content": [{"type": "image_url", "image_url": "file://x"}]}],
                                      [{"role": "user", "content": []}], [5]])  # fmt: skip
async def test_messages_without_text_are_refused(site: Site, messages: Any) -> None:
    """No messages, unknown roles and content that is not text should be a 400 that names `messages`."""
    await refused(site, CHAT, {"messages": messages}, param="messages")
    await site.check_alive()


@pytest.mark.case(4)
@pytest.mark.parametrize("prompt", [[5] * 513, "cat " * 600, "x" * 3_000_000])
async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(site: Site, prompt: Any) -> None:
    """A prompt longer than the context should name its length and the limit, in every size."""
    error = await refused(site, COMPLETIONS, {"prompt": prompt}, param="prompt")
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    if isinstance(prompt, list):
        assert "513" in error["message"]


@pytest.mark.case(5)
async def test_max_tokens_may_be_absent_or_null(site: Site) -> None:
    """Absent and null should mean the same: 16 for completions, what fits for chat."""
    site.says("cat ", adds_end=False)
    for extra in ({}, {"max_tokens": None}):
        _, completion = await site.post(COMPLETIONS, {"prompt": "hi", **extra})
        assert completion["usage"]["completion_tokens"] == 16
        status, chat = await site.post(CHAT, {"messages": USER, "max_completion_tokens": None, **extra})
        assert status == 200
        assert chat["usage"]["total_tokens"] == 512
        assert chat["choices"][0]["finish_reason"] == "length"


@pytest.mark.case(5)
async def test_the_two_spellings_of_max_tokens_agree(site: Site) -> None:
    """`max_tokens` and `max_completion_tokens` should do the same in chat; two values that differ are refused."""
    site.says("cat ", adds_end=False)
    for extra in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        _, answer = await site.post(CHAT, {"messages": USER, **extra})
        assert answer["usage"]["completion_tokens"] == 3
    await refused(site, CHAT, {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, param="max_tokens")


@pytest.mark.case(6)
async def test_max_tokens_is_never_shortened_silently(site: Site) -> None:
    """A budget that does not fit beside the prompt should be refused; one that just fits be served."""
    error = await refused(site, COMPLETIONS, {"prompt": [5] * 508, "max_tokens": 100})
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("508", "100", "512"))
    site.says("cat ", adds_end=False)
    _, answer = await site.post(COMPLETIONS, {"prompt": [5] * 508, "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] == 4


async def test_what_no_worker_can_hold_is_refused(make_site: SiteMaker) -> None:
    """A request within the context but beyond the block pool should be a 400 at once, and a small one be served."""
    site = await make_site(worker={"num_blocks": 8})
    error = await refused(site, COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 5})
    assert error["code"] == "context_length_exceeded"
    await site.check_alive()


async def test_what_a_window_lets_a_worker_hold_is_let_in(make_site: SiteMaker) -> None:
    """The same request should be served where the workers' windows fit the pool, and be refused where they do not."""
    site = await make_site(worker={"num_blocks": 8, "window": 64, "step_tokens": 48})
    site.says("cat ", adds_end=False)
    _, answer = await site.post(COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] == 4
    site = await make_site(worker={"num_blocks": 8, "window": 64, "step_tokens": 64})
    error = await refused(site, COMPLETIONS, {"prompt": [5] * 200, "max_tokens": 5})
    assert "9 blocks of 16" in error["message"]


@pytest.mark.case(7)
@pytest.mark.parametrize("prompt", [[-1], [[-1]], [[1, -2147483649]], [10**9], [2**64], [1.5], [[1, True]], [1, "x"]])
async def test_ids_outside_the_vocabulary_are_refused(site: Site, prompt: Any) -> None:
    """Negative, too large and non-integer token ids should never reach a worker."""
    await refused(site, COMPLETIONS, {"prompt": prompt}, param="prompt")
    await site.check_alive()


@pytest.mark.case(13, 102)
@pytest.mark.parametrize("stop", [["x"] * 17, [""], "", [5], 5, {"a": 1}, ["x"] * 1_000_000, "y" * 2000])
async def test_stop_is_bounded(site: Site, stop: Any) -> None:
    """More stop strings than documented, empty ones and other types should be a 400 that names `stop`."""
    await refused(site, COMPLETIONS, {"prompt": "hi", "stop": stop}, param="stop")


@pytest.mark.case(13)
async def test_stop_as_string_and_as_list_are_the_same(site: Site) -> None:
    """`"x"` and `["x"]` should give the same text; null and [] mean none; five strings are within the limit."""
    texts = {}
    for name, stop in {"str": "this", "list": ["this"], "null": None, "none": [], "five": list("!?#%&")}.items():
        status, answer = await site.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 50, "stop": stop})
        assert status == 200
        texts[name] = answer["choices"][0]["text"]
    assert texts["str"] == texts["list"] == "hello world, "
    assert texts["null"] == texts["none"] == texts["five"] == TEXT


@pytest.mark.case(16)
async def test_an_answer_is_one_json_object(site: Site) -> None:
    """The body of a plain call should be a JSON object under its media type, not a string that holds JSON."""
    async with site.http.post(site.base_url + CHAT, json={"messages": USER}) as response:
        assert response.headers["Content-Type"].startswith("application/json")
        assert isinstance(orjson.loads(await response.read()), dict)


@pytest.mark.case(21)
async def test_up_to_twenty_logprobs(site: Site) -> None:
    """20 alternatives should be served, 21 and -1 refused with the limit in the message."""
    status, answer = await site.post(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 20})
    assert status == 200
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
    for wrong, limit in ((21, "20"), (-1, "0")):
        body = {"messages": USER, "logprobs": True, "top_logprobs": wrong}
        assert limit in (await refused(site, CHAT, body, param="top_logprobs"))["message"]
    await refused(site, CHAT, {"messages": USER, "top_logprobs": 2}, param="top_logprobs")


@pytest.mark.case(23)
@pytest.mark.parametrize("data", [b'{"prompt":"\xff\xfe"}', '{"prompt":"你好"}'.encode("gbk"), b"\xff\xfe{\x00}\x00",
                                  b'\xef\xbb\xbf{"prompt":"x"}', b'{"prompt":"\\ud800"}', b"", b"[]", b'"x"',
                                  b"{", b'{"prompt":"\x00"}'])  # fmt: skip
async def test_bodies_that_are_not_utf8_json_are_refused(site: Site, data: bytes) -> None:
    """Other encodings, lone surrogates and broken JSON should be a 400."""
    status, answer = await site.post_raw(COMPLETIONS, data)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    await site.check_alive()


@pytest.mark.case(25)
@pytest.mark.parametrize("data", [
    b"[" * 20_000, b'{"prompt":"x","x":' + b"[" * 500 + b"]" * 500 + b"}", b'{"x":' * 20_000,
    b'{"prompt":"x","tools":[{"parameters":' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}]}",
    b'{"prompt":"x","max_tokens":' + b"9" * 100_000 + b"}",
    b'{"prompt":"x",' + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}"])  # fmt: skip
async def test_bombs_of_json_are_refused_quickly(site: Site, data: bytes) -> None:
    """Deep nesting, endless numbers and floods of keys should be a 400 within a second."""
    started = time.monotonic()
    status, answer = await site.post_raw(COMPLETIONS, data)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert time.monotonic() - started < 1
    await site.check_alive()


@pytest.mark.case(38)
@pytest.mark.parametrize("bias", [{"999999": 1}, {"-1": 1}, {"x": 1}, {"5": 1e9}, {"5": "NaN"}, {"5": None}, [1],
                                  {"1_0": 1}, {"٣": 1}, {"5": -101}])  # fmt: skip
async def test_logit_bias_outside_its_range_is_refused(site: Site, bias: Any) -> None:
    """Ids outside the vocabulary and values outside [-100, 100] should be a 400 that names `logit_bias`."""
    await refused(site, COMPLETIONS, {"prompt": "hi", "logit_bias": bias}, param="logit_bias")
    await site.check_alive()


@pytest.mark.case(38)
async def test_padded_rows_of_the_vocabulary_take_no_bias(site: Site) -> None:
    """An id that only the padding of the model's vocabulary has should be refused."""
    padded = site.app.gateway.directory.find(None).text.folder.max_token_id + 1
    await refused(site, COMPLETIONS, {"prompt": "hi", "logit_bias": {str(padded): 1}}, param="logit_bias")


@pytest.mark.case(40)
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                                   "repetition_penalty"])  # fmt: skip
async def test_numbers_must_be_finite_and_in_range(site: Site, field: str) -> None:
    """NaN, infinities, overflows, strings and out-of-range numbers should be a 400 with valid JSON, in every field."""
    for value in ("NaN", "Infinity", "-Infinity", "1e999", '"nan"', "true", "[1]", "-3", "2.5"):
        status, answer = await site.post_raw(COMPLETIONS, f'{{"prompt":"hi","{field}":{value}}}'.encode())
        assert status == 400, (field, value)
        assert isinstance(answer["error"]["message"], str)
    await site.check_alive()


@pytest.mark.case(25)
@pytest.mark.parametrize("field", ["metadata", "user", "model", "seed", "temperature", "stop_token_ids", "logit_bias",
                                   "stream_options", "store", "prompt", "stop", "tools"])  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_deep_values_are_refused_in_every_field(site: Site, path: str, field: str) -> None:
    """Nesting that parses but cannot be written again should be a 400, wherever it stands."""
    for deep in (b"[" * 300 + b"]" * 300, b'{"5":' * 300 + b"1" + b"}" * 300):
        body = b'{"prompt":"hi","messages":[{"role":"user","content":"hi"}],"%b":%b}' % (field.encode(), deep)
        status, answer = await site.post_raw(path, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_json")
    await site.check_alive()


LONG = "x" * 100_000


@pytest.mark.parametrize("body", [{"logit_bias": {LONG: "x"}}, {"logit_bias": {LONG: 1}}, {"temperature": [[LONG]]},
                                  {"stop_token_ids": {LONG: 1}}, {"model": LONG}, {LONG: 1}, {"user": LONG},
                                  {"stream_options": {LONG: 1}}, {"stop": LONG}, {"n": LONG}, {"chat_template": LONG},
                                  {"messages": [{"role": LONG}]},
                                  {"messages": [{"role": "user", "content": "", LONG: 1}]},
                                  {"messages": [{"role": "user", "content": [{LONG: 1}]}]}])  # fmt: skip
async def test_an_error_repeats_little_of_what_was_sent(site: Site, body: dict[str, Any]) -> None:
    """An error's message should stay short, however long the wrong name or value is."""
    error = await refused(site, CHAT, {"messages": USER, **body})
    assert len(orjson.dumps(error)) < 600


async def test_a_model_is_named_by_its_ends(site: Site) -> None:
    """A name that is just allowed should be shown by its beginning and its end in the 404."""
    name = "begin" + "x" * 502 + "ends!"
    status, answer = await site.post(COMPLETIONS, {"prompt": "hi", "model": name})
    assert status == 404
    assert answer["error"]["message"].startswith("model: 'beginxxx")
    assert answer["error"]["message"].endswith("xends!' is not served here; served: tiny")
    assert len(answer["error"]["message"]) < 300


async def test_a_repetition_penalty_near_zero_is_refused(site: Site) -> None:
    """A penalty by which logits cannot be divided should be refused: every token would be as good."""
    await refused(site, COMPLETIONS, {"prompt": "hi", "repetition_penalty": 1e-300}, param="repetition_penalty")
    assert (await site.post(COMPLETIONS, {"prompt": "hi", "repetition_penalty": 0.01}))[0] == 200


@pytest.mark.case(52)
@pytest.mark.parametrize("seed", [2**63, 2**64, -(2**63) - 1, 1.5, "7", True])
async def test_seeds_are_int64(site: Site, seed: Any) -> None:
    """A seed that is no signed 64-bit integer should be refused before it meets the wire."""
    await refused(site, COMPLETIONS, {"prompt": "hi", "seed": seed}, param="seed")


@pytest.mark.case(52)
async def test_seed_minus_one_draws_a_seed(site: Site) -> None:
    """-1 and absence should each draw a new seed; any other seed is taken, negative ones too."""
    for seed in (-1, None, -1, None, 0, 7, -(2**63), 2**63 - 1):
        status, _ = await site.post(COMPLETIONS, {"prompt": "hi", "seed": seed})
        assert status == 200
    seeds = [body.sampling.seed for body in site.worker.bodies]
    assert len(set(seeds[:4])) == 4
    assert seeds[4:6] == [0, 7]
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.case(61)
@pytest.mark.parametrize(("field", "value"), [
    ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("response_format", {"type": "json_object"}),
    ("functions", [{}]), ("guided_regex", ".*"), ("structured_outputs", {"regex": "a"}),
    ("lora", "a"), ("use_beam_search", True), ("bad_words", ["x"]), ("allowed_token_ids", [1]),
    ("chat_template", "x"), ("chat_template_kwargs", {"a": 1}), ("prompt_logprobs", 0), ("truncate_prompt_tokens", 5),
    ("modalities", ["audio"]), ("reasoning_effort", "high")])  # fmt: skip
async def test_what_is_not_built_is_refused_by_name(site: Site, field: str, value: Any) -> None:
    """A field of the API that is not built should be a 400 that names it, never be ignored."""
    error = await refused(site, CHAT, {"messages": USER, field: value}, param=field)
    assert field in error["message"]


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x")])
async def test_what_is_not_built_of_completions_is_refused_by_name(site: Site, field: str, value: Any) -> None:
    """The same for the fields that only completions have."""
    await refused(site, COMPLETIONS, {"prompt": "hi", field: value}, param=field)


async def test_neutral_values_of_unbuilt_fields_are_accepted(site: Site) -> None:
    """What clients send by default should not be refused."""
    body = {"messages": USER, "tools": None, "tool_choice": "none", "response_format": {"type": "text"},
            "functions": [], "priority": 0, "use_beam_search": False, "chat_template_kwargs": {}, "best_of": 1,
            "parallel_tool_calls": True, "modalities": ["text"], "user": "someone"}  # fmt: skip
    async with site.http.post(site.base_url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        assert "x-quire-ignored-fields" not in response.headers


async def test_unknown_fields_are_named(site: Site) -> None:
    """A field that we do not know should be named in a response header; a hostile name is refused."""
    for stream in (False, True):
        body = {"messages": USER, "zebra": 1, "metadata": {"a": "b"}, "stream": stream}
        async with site.http.post(site.base_url + CHAT, json=body) as response:
            assert response.headers["x-quire-ignored-fields"] == "metadata, zebra"
    await refused(site, CHAT, {"messages": USER, "a\r\nSet-Cookie: x": 1})


@pytest.mark.case(80)
@pytest.mark.parametrize("extra", [{"min_tokens": 2**31}, {"min_tokens": 6, "max_tokens": 5}, {"min_tokens": -1},
                                   {"min_tokens": 2**31, "max_tokens": 2**31}, {"min_tokens": 1.5}])  # fmt: skip
async def test_min_tokens_that_cannot_be_reached_is_refused(site: Site, extra: dict[str, Any]) -> None:
    """More `min_tokens` than `max_tokens` or the context allows, or a negative count, should be a 400."""
    await refused(site, COMPLETIONS, {"prompt": "hi", **extra})
    await site.check_alive()


@pytest.mark.case(102)
@pytest.mark.parametrize("extra", [
    {"logit_bias": {str(i): 1 for i in range(1_000_000)}}, {"bad_words": ["x"] * 1_000_000},
    {"stop_token_ids": [1] * 1_000_000}, {"prompt": [[1]] * 100_000}, {"prompt": ["x"] * 257},
    {"prompt": ["x"] * 200, "n": 2}], ids=["bias", "bad_words", "stop_ids", "prompts", "257", "choices"])  # fmt: skip
async def test_huge_arrays_are_refused(site: Site, extra: dict[str, Any]) -> None:
    """Arrays beyond their stated limits should be a 400."""
    await refused(site, COMPLETIONS, {"prompt": "hi", **extra})


@pytest.mark.case(102)
async def test_too_many_messages_are_refused(site: Site) -> None:
    """The number of messages is limited too."""
    await refused(site, CHAT, {"messages": USER * (limits.MAX_MESSAGES + 1)}, param="messages")


@pytest.mark.case(103)
@pytest.mark.parametrize("n", [0, -1, 129, 10**9, 1.5, True, "2", [1]])
async def test_n_is_bounded(site: Site, n: Any) -> None:
    """`n` outside 1..128, or no integer, should be a 400 that names it."""
    await refused(site, COMPLETIONS, {"prompt": "hi", "n": n}, param="n")


@pytest.mark.parametrize("priority", [2**31 + 1, -(2**31) - 1, 10**30, 1.0, 1.5, True, "1", "high", [1], {}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_priority_is_a_bounded_integer(site: Site, path: str, priority: Any) -> None:
    """A priority that is no integer of at most 2**31 either way should be a 400 that names it, in both APIs."""
    error = await refused(site, path, {"prompt": "hi", "messages": USER, "priority": priority}, param="priority")
    assert error["message"].startswith("priority: ")
    for number in ("NaN", "Infinity", "1e999"):
        status, _ = await site.post_raw(path, f'{{"prompt":"hi","priority":{number}}}'.encode())
        assert status == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "expected"), [
    ({}, (0, "")), ({"priority": None, "user": None}, (0, "")),
    ({"priority": -(2**31), "user": "ann"}, (-(2**31), "ann")),
    ({"priority": 2**31, "user": "x" * 512}, (2**31, "x" * 512))])  # fmt: skip
async def test_priority_and_user_reach_the_scheduler(
    site: Site, path: str, fields: dict[str, Any], expected: tuple[int, str]
) -> None:
    """Both APIs should hand priority and user on as they were sent; absent and null mean 0 and nobody."""
    _, answer = await site.post(path, {"prompt": "hi", "messages": USER, **fields})
    record = await site.bus.load_record(answer["id"])
    assert record is not None
    assert (record.summary.priority, record.summary.user) == expected


@pytest.mark.parametrize("user", ["x" * 513, 5, True, ["x"], {"a": "b"}, 1.5])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_user_is_a_short_text(site: Site, path: str, user: Any) -> None:
    """A user that is no text, or longer than 512 characters, should be a 400 that names it."""
    await refused(site, path, {"prompt": "hi", "messages": USER, "user": user}, param="user")


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "top_k", "n", "logprobs", "stream", "ignore_eos", "user",
                                   "model", "stop_token_ids", "stream_options"])  # fmt: skip
async def test_wrong_types_are_refused_by_name(site: Site, field: str) -> None:
    """A value of the wrong JSON type should be a 400 that names the field."""
    wrong: list[Any] = [{"a": 1}, [[]], 1.5]
    wrong += [] if field in ("user", "model") else ["x"]
    for value in wrong:
        status, answer = await site.post(COMPLETIONS, {"prompt": "hi", field: value})
        assert (status, answer["error"]["param"]) == (400, field), (field, value)


async def test_a_model_that_is_not_served_is_404(site: Site) -> None:
    """Another model's name should be a 404 with OpenAI's code that names what is served, whatever it spells."""
    for name in ("gpt-4", "../../etc/passwd", "tiny%2f", "x" * 500):
        status, answer = await site.post(COMPLETIONS, {"prompt": "hi", "model": name})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert answer["error"]["message"].endswith("is not served here; served: tiny")


async def test_nothing_serves_is_503(make_site: SiteMaker) -> None:
    """Without a live worker of the model a request should be refused with Retry-After; a wrong one still with 400."""
    site = await make_site(worker={"model": "another"})
    async with site.http.post(site.base_url + COMPLETIONS, json={"prompt": "hi"}) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
    assert (await site.post(COMPLETIONS, {"prompt": ""}))[0] == 400


def test_bodies_of_too_many_values_are_not_parsed() -> None:
    """One call parses all of a body; what makes it slow is refused by its bytes, and long texts are not what does."""
    text = b'{"prompt": "' + b"a:[{ 1,2 " * 2**17 + b'"}'
    assert len(parse_json(text)["prompt"]) == 9 * 2**17
    for values in (b"[]," * 2**19 + b"[]", b"{}," * 2**19 + b"{}", b'{"a":1},' * 2**18 + b"0"):
        with pytest.raises(InvalidRequest, match="more than 500000 fields, lists and objects"):
            parse_json(b'{"prompt": [' + values + b"]}")
