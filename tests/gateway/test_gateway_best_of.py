"""`best_of`: more is computed than shown, and what is shown follows from the log alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway import limits
from tests.gateway.conftest import Site, SiteMaker

COMPLETIONS = "/v1/completions"
WORDS = ["one", "two", "three", "cat"]
MEANS = [-1.0, -0.9, -2.0, -0.5]
"""Of the four choices."""


@pytest.fixture
def voting_site(site: Site) -> Site:
    """Choice `c` says `WORDS[c]` so often that the sums of log probabilities put the choices in another order."""
    return prepare(site)


def prepare(site: Site) -> Site:
    ids = [site.tokenizer.encode(word).ids for word in WORDS]
    site.worker.script = lambda body, choice: ids[choice % 4] * (1 + choice % 4 * 3)
    site.worker.logprob = lambda choice, position: MEANS[choice % 4]
    return site


def texts(answer: dict[str, Any]) -> list[str]:
    """The word that each choice repeats, in order; their indexes count up."""
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    shown = [choice["text"] for choice in answer["choices"]]
    return [next(word for word in WORDS if text.replace(word, "") == "") for text in shown]


BEST = {"prompt": "hi", "best_of": 4, "max_tokens": 60}


@pytest.mark.parametrize(("n", "expected"), [(None, ["cat"]), (1, ["cat"]), (2, ["cat", "two"]),
                                             (3, ["cat", "two", "one"])])  # fmt: skip
async def test_the_best_by_mean_logprob_are_shown(voting_site: Site, n: int | None, expected: list[str]) -> None:
    """The `n` choices with the highest mean log probability a token should come, best first, whatever their lengths."""
    status, answer = await voting_site.post(COMPLETIONS, BEST | {"n": n})
    assert (status, texts(answer)) == (200, expected)
    assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])


async def test_all_sampled_tokens_are_used_tokens(voting_site: Site) -> None:
    """Usage should count each choice that was computed, shown or not, and the prompt once."""
    _, answer = await voting_site.post(COMPLETIONS, BEST)
    lengths = [len(voting_site.tokenizer.encode(word).ids) * (1 + 3 * c) + 1 for c, word in enumerate(WORDS)]
    assert answer["usage"]["completion_tokens"] == sum(lengths)
    assert answer["usage"]["prompt_tokens"] == len(voting_site.worker.bodies[0].prompts[0])


async def test_each_prompt_has_its_best(voting_site: Site) -> None:
    """With several prompts the choices of each should be compared among themselves."""
    _, answer = await voting_site.post(COMPLETIONS, BEST | {"prompt": ["hi", "there"], "n": 2})
    assert texts(answer) == ["cat", "two", "cat", "two"]


async def test_equal_choices_keep_their_order(site: Site) -> None:
    """Of choices that are equally likely the first ones should be shown, so that the answer is always the same."""
    prepare(site).worker.logprob = lambda choice, position: -1.0
    _, answer = await site.post(COMPLETIONS, BEST | {"n": 2})
    assert texts(answer) == ["one", "two"]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_logprobs_come_only_when_asked_for(voting_site: Site, logprobs: int | None) -> None:
    """The log probabilities that the comparison needs should not show up by themselves, and as asked for otherwise."""
    _, answer = await voting_site.post(COMPLETIONS, BEST | {"logprobs": logprobs})
    shown = answer["choices"][0]["logprobs"]
    assert voting_site.worker.bodies[0].sampling.num_logprobs == (logprobs or 0)
    if logprobs is None:
        assert shown is None
    else:
        assert all(math.isclose(logprob, -0.5) for logprob in shown["token_logprobs"])
        assert (shown["top_logprobs"] is None) == (logprobs == 0)


async def test_what_lies_past_a_stop_string_has_no_say(site: Site) -> None:
    """A choice that a stop string ends should be judged by its tokens up to there."""
    ids = [site.tokenizer.encode(text).ids for text in ("one!" + "x" * 20, "two" * 3)]
    site.worker.script = lambda body, choice: ids[choice]
    marks = [len(site.tokenizer.encode("one!").ids), 0]
    site.worker.logprob = lambda choice, position: -0.1 if choice == 0 and position < marks[0] else -5.0 + 4.5 * choice
    _, answer = await site.post(COMPLETIONS, {"prompt": "hi", "best_of": 2, "max_tokens": 40, "stop": "!"})
    assert answer["choices"][0]["text"] == "one"


async def test_as_many_as_shown_is_no_choice(voting_site: Site) -> None:
    """`best_of` equal to `n` should be the same as `n` alone, streamed too."""
    _, answer = await voting_site.post(COMPLETIONS, BEST | {"n": 4})
    assert texts(answer) == WORDS
    assert voting_site.worker.bodies[0].sampling.num_logprobs is None
    url = voting_site.base_url + COMPLETIONS
    async with voting_site.http.post(url, json=BEST | {"n": 4, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        await response.read()


async def test_the_choice_is_the_same_again(bus_site: Site, make_site: SiteMaker) -> None:
    """The same POST under its key, and the stream's name, should give the first answer, at another gateway too."""
    site, headers = prepare(bus_site), {"Idempotency-Key": "best"}
    first = await site.post(COMPLETIONS, BEST | {"n": 2}, headers=headers)
    other = await make_site(bus=site.bus, leads=False, worker={"model": "tiny"})
    for one in (site, other):
        assert await one.post(COMPLETIONS, BEST | {"n": 2}, headers=headers) == first
        assert await one.get(f"/v1/streams/{first[1]['id']}") == first
    await other.worker.stop()
    await site.bus.bye(other.worker.worker_id)


@pytest.mark.case(103)
@pytest.mark.parametrize("best_of", [0, -1, limits.MAX_N + 1, 10**9, 10**30, 1.0, 1.5, True, "2", [1], {}])
async def test_best_of_is_bounded(site: Site, best_of: Any) -> None:
    """`best_of` outside 1..128, or no integer, should be a 400 that names it, streamed or not."""
    for stream in (False, True):
        status, answer = await site.post(COMPLETIONS, {"prompt": "hi", "best_of": best_of, "stream": stream})
        assert (status, answer["error"]["param"]) == (400, "best_of")
        assert answer["error"]["message"].startswith("best_of: ")
    assert await site.bus.list_live() == set()
    await site.check_alive()


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True},
                                    {"prompt": ["hi"] * 100, "best_of": 3}])  # fmt: skip
async def test_best_of_must_agree_with_the_rest(site: Site, fields: dict[str, Any]) -> None:
    """Fewer than `n`, a stream, and too many choices over all prompts should each be a 400 that names `best_of`."""
    status, answer = await site.post(COMPLETIONS, {"prompt": "hi"} | fields)
    assert (status, answer["error"]["param"]) == (400, "best_of")


async def test_chat_has_no_best_of(site: Site) -> None:
    """In chat, which has no such field, it should be refused by name unless it asks for nothing."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await site.post("/v1/chat/completions", body | {"best_of": 1}))[0] == 200
    status, answer = await site.post("/v1/chat/completions", body | {"best_of": 2})
    assert (status, answer["error"]["param"]) == (400, "best_of")
