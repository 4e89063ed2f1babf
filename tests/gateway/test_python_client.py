"""The Python API's client against a gateway: outputs, streams, what is tried again and what is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import pytest

from quire import (
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from quire.api.client import Client, chat_job, completion_job
from quire.api.deployment import RunningDeployment
from quire.api.prompts import Prompt
from shared.errors import ArgumentError, DeploymentError, RequestFailed
from tests.gateway.conftest import TEXT, Site, SiteMaker
from tests.gateway.tiny_model import END
from tests.waiting import wait_until_async

MESSAGES = [{"role": "user", "content": "hi"}]
FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY}


@pytest.fixture
async def client(site: Site) -> AsyncIterator[Client]:
    client = Client(RunningDeployment(site.base_url + "/v1/", None), "")
    yield client
    await client.close()


@pytest.fixture
async def llm(site: Site) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(base_url=site.base_url) as llm:
        yield llm


def job(prompt: str = "hi", **sampling: Any) -> Any:
    return completion_job("0", Prompt(text=prompt), SamplingParams(**{"max_tokens": 50} | sampling))


def drawn(site: Site) -> list[int]:
    return [*site.tokenizer.encode(TEXT).ids, site.tokenizer.token_to_id(END)]


def without_times(output: RequestOutput) -> dict[str, Any]:
    return {name: value for name, value in asdict(output).items() if name != "metrics"}


async def test_an_output_holds_all_that_is_known(site: Site, client: Client) -> None:
    """Text, ids, why it ended, the prompt in both forms, cached tokens and times should be there."""
    site.worker.num_cached = lambda choice: 1
    output = await client.complete(job())
    (choice,) = output.outputs
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == (
        TEXT, drawn(site), "stop", None)  # fmt: skip
    assert (output.prompt, output.prompt_token_ids) == ("hi", site.tokenizer.encode("hi").ids)
    assert (output.finished, output.num_cached_tokens, choice.logprobs, choice.cumulative_logprob) == (
        True, 1, None, None)  # fmt: skip
    assert output.metrics is not None
    assert output.metrics.finished_time is not None
    assert output.metrics.finished_time >= output.metrics.arrival_time


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("num_top", [0, 2])
async def test_logprobs_are_those_of_each_token(site: Site, client: Client, is_chat: bool, num_top: int) -> None:
    """One mapping for each token, from id to logprob, rank and text: of the drawn token and of the best ones."""
    sampling = SamplingParams(max_tokens=50, logprobs=num_top, stop=["is the"])
    made = chat_job("0", MESSAGES, sampling) if is_chat else completion_job("0", Prompt(text="hi"), sampling)
    (choice,) = (await client.complete(made)).outputs
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    assert [next(iter(position)) for position in choice.logprobs] == choice.token_ids
    first = choice.logprobs[0]
    assert (first[choice.token_ids[0]].logprob, first[choice.token_ids[0]].decoded_token) == (-0.5, "hello")
    assert [first[token_id].rank for token_id in range(num_top)] == list(range(1, num_top + 1))
    assert len(first) == num_top + 1
    expected = sum(-0.5 - position / 10 for position in range(len(choice.token_ids)))
    assert choice.cumulative_logprob == pytest.approx(expected)


async def test_stop_reasons(site: Site, client: Client) -> None:
    """A stop string and a stop token should be named; the model's own end token not."""
    (by_string,) = (await client.complete(job(stop=["is the"]))).outputs
    (by_token,) = (await client.complete(job(stop_token_ids=[drawn(site)[3]]))).outputs
    (by_length,) = (await client.complete(job(max_tokens=2))).outputs
    ends = [(choice.finish_reason, choice.stop_reason) for choice in (by_string, by_token, by_length)]
    assert ends == [("stop", "is the"), ("stop", drawn(site)[3]), ("length", None)]
    assert by_token.token_ids == drawn(site)[:4]


@pytest.mark.parametrize(
    "sampling", [{}, {"n": 3}, {"logprobs": 2}, {"stop": ["is the", "zzz"]}, {"max_tokens": 1}], ids=str
)
@pytest.mark.parametrize("is_chat", [False, True])
async def test_streams_end_with_the_whole_output(
    site: Site, client: Client, sampling: dict[str, Any], is_chat: bool
) -> None:
    """Outputs of a stream should grow, and the last one be that of a call which does not stream; deltas join to it."""
    values = {"max_tokens": 50, "seed": 1} | sampling

    def make(**kind: Any) -> Any:
        params = SamplingParams(**values, **kind)
        return chat_job("0", MESSAGES, params) if is_chat else completion_job("0", Prompt(text="hi"), params)

    whole = await client.complete(make())
    grown = [output async for output in client.stream(make())]
    assert without_times(grown[-1]) == without_times(whole) | {"prompt": None if is_chat else "hi"}
    lengths = [[len(choice.token_ids) for choice in output.outputs] for output in grown]
    assert lengths == sorted(lengths)
    assert [output.finished for output in grown] == [False] * (len(grown) - 1) + [True]
    deltas = [output async for output in client.stream(make(output_kind=RequestOutputKind.DELTA))]
    assert [output.finished for output in deltas if output.outputs[-1].finish_reason][-1:] == [True]
    if len(whole.outputs) == 1:
        assert sum(output.outputs[0].finish_reason is not None for output in (*grown, *deltas)) == 2
    for index, choice in enumerate(whole.outputs):
        parts = [output.outputs[index] for output in deltas]
        assert "".join(part.text for part in parts) == choice.text
        assert [token_id for part in parts for token_id in part.token_ids] == choice.token_ids
    (final,) = [output async for output in client.stream(make(**FINAL))]
    assert without_times(final) == without_times(whole)


async def test_chat_shows_its_prompt(site: Site, client: Client) -> None:
    """A conversation's prompt should be shown as the template wrote it."""
    output = await client.complete(chat_job("0", MESSAGES, SamplingParams()))
    assert output.prompt == f"<|im_start|>user\nhi{END}\n<|im_start|>assistant\n"


async def test_no_limit_is_the_rest_of_the_context(site: Site, client: Client) -> None:
    """`max_tokens=None` should go on until the context is full, for text, ids and chat."""
    site.says("cat ", adds_end=False)
    (choice,) = (await client.complete(job(max_tokens=None, ignore_eos=True))).outputs
    num_prompt = len(site.tokenizer.encode("hi").ids)
    assert (len(choice.token_ids), choice.finish_reason) == (512 - num_prompt, "length")
    by_ids = completion_job("0", Prompt(token_ids=(1, 2, 3)), SamplingParams(max_tokens=None, ignore_eos=True))
    assert len((await client.complete(by_ids)).outputs[0].token_ids) == 509


async def test_refusals_are_waited_for(make_site: SiteMaker) -> None:
    """A gateway that refuses for now should be asked again; all prompts be answered, in their order."""
    site = await make_site(tenant_max_in_flight=1)
    site.worker.script = lambda body, choice: list(body.prompts[0])
    site.leader.is_dispatching.clear()
    client = Client(RunningDeployment(site.base_url, None), "tiny")
    prompts = [Prompt(token_ids=(40 + number, 41)) for number in range(3)]
    jobs = [completion_job(str(number), prompt, SamplingParams()) for number, prompt in enumerate(prompts)]
    outputs = asyncio.gather(*map(client.complete, jobs))
    await wait_until_async(lambda: _has_refused(site), description="two are refused")
    site.leader.is_dispatching.set()
    ids = [output.outputs[0].token_ids[:2] for output in await outputs]
    assert ids == [[40 + number, 41] for number in range(3)]
    await client.close()


async def _has_refused(site: Site) -> bool:
    async with site.http.get(site.base_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("quire:requests_refused_total{")) >= 2


class Line:
    """A TCP line to `port` that can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        """Its address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, to_writer]
        await asyncio.gather(_pass_on(reader, to_writer), _pass_on(to_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.transport.abort()


async def test_a_cut_stream_goes_on(site: Site) -> None:
    """After its connection broke a stream should be taken up where it ended, nothing lost or doubled."""
    site.worker.step_s = 0.02
    site.app.gateway.drain.is_closing = True  # as a gateway that ends: requests whose streams are cut run on
    line = Line(int(site.base_url.rpartition(":")[2]))
    async with AsyncLLM(base_url=await line.open()) as llm:
        params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)
        num_outputs, ids, text = 0, [], ""
        async for output in llm.generate("hi", params, "cut"):
            num_outputs += 1
            ids += output.outputs[0].token_ids
            text += output.outputs[0].text
            if num_outputs in (2, 5):
                line.cut()
    assert num_outputs > 5
    assert (ids, text) == (drawn(site), TEXT)
    await line.close()


async def test_whoever_is_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never answers should be an exception after a while, for answers and streams."""
    monkeypatch.setattr(RunningDeployment, "patience_s", 0.3)
    client = Client(RunningDeployment("http://127.0.0.1:9", None), "m")
    with pytest.raises(DeploymentError, match="does not answer"):
        await client.complete(job())
    with pytest.raises(DeploymentError, match="does not answer"):
        _ = [output async for output in client.stream(job())]
    await client.close()


async def test_no_worker_is_given_up(make_site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody serves the model the caller should hear so, after a while."""
    monkeypatch.setattr(RunningDeployment, "patience_s", 0.3)
    site = await make_site()
    await site.worker.stop()
    await wait_until_async(lambda: _has_no_worker(site), description="the worker is lost")
    client = Client(RunningDeployment(site.base_url, None), "")
    with pytest.raises(RequestFailed, match="no worker"):
        await client.complete(job())
    await client.close()


async def _has_no_worker(site: Site) -> bool:
    return not site.app.gateway.health.serving()


async def test_errors_are_in_the_callers_words(make_site: SiteMaker) -> None:
    """What the gateway refuses should be a ValueError with its words; a key that is wrong, named as such."""
    site = await make_site(api_key=("secret",))
    client, other = (Client(RunningDeployment(site.base_url, "secret"), name) for name in ("", "other"))
    with pytest.raises(ValueError, match="maximum context length is 512 tokens"):
        await client.complete(job(max_tokens=600))
    with pytest.raises(ArgumentError, match="model='other': is not served there; served: tiny"):
        await other.model_card()
    stranger = Client(RunningDeployment(site.base_url, "wrong"), "tiny")
    with pytest.raises(ArgumentError, match="api_key"):
        await stranger.complete(job())
    await asyncio.gather(client.close(), other.close(), stranger.close())


async def test_adapters_that_are_not_served_are_refused(site: Site) -> None:
    """A LoRARequest should name what is served, and anything else is no such thing."""
    adapter = LoRARequest("sql", 1, "/adapters/sql")
    client = Client(RunningDeployment(site.base_url, None), "")
    with pytest.raises(ArgumentError, match="lora_request: no adapter 'sql' is served; served: tiny; give its"):
        await client.complete(completion_job("0", Prompt(text="hi", lora_request=adapter), SamplingParams()))
    await client.close()
    with pytest.raises(ArgumentError, match="lora_request: must be a LoRARequest, got str"):
        chat_job("0", MESSAGES, SamplingParams(), lora_request="sql")


def test_other_sampling_params_are_refused() -> None:
    """A dict is no SamplingParams, and the error should say so."""
    with pytest.raises(ArgumentError, match="sampling_params: must be SamplingParams, got dict"):
        completion_job("0", Prompt(text="hi"), {"max_tokens": 3})  # type: ignore[arg-type]


async def test_unknown_fields_of_chat_are_refused() -> None:
    """Nothing that a caller asks for should be passed over."""
    with pytest.raises(ArgumentError, match=r"chat\(\) has no argument colour"):
        chat_job("0", MESSAGES, SamplingParams(), colour="red")
    with pytest.raises(ArgumentError, match="tools: not supported"):
        chat_job("0", MESSAGES, SamplingParams(), tools=[{"type": "function"}])


async def test_abort_ends_a_request(site: Site, llm: AsyncLLM) -> None:
    """`abort` should end the stream with what there was, and the request in the cell."""
    site.says("cat ", adds_end=False)
    site.worker.step_s = 0.005
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    outputs = []
    async for output in llm.generate("hi", params, "mine"):
        outputs.append(output)
        if len(outputs) == 3:
            with pytest.raises(ArgumentError, match="request_id='mine'"):
                await anext(aiter(llm.generate("hi", params, "mine")))
            await llm.abort("mine")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert 0 < len(outputs[-1].outputs[0].token_ids) < 400
    await wait_until_async(lambda: _is_at_rest(site), description="the request is gone")
    await llm.abort("unknown")


async def test_the_older_names(site: Site) -> None:
    """`AsyncLLMEngine.from_engine_args` should make the same, with the same arguments, and stream as ever."""
    async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs(base_url=site.base_url)) as engine:
        params = SamplingParams(max_tokens=50)
        outputs = [o async for o in engine.generate(prompt="hi", sampling_params=params, request_id="0")]
    assert outputs[-1].outputs[0].text == TEXT
    with pytest.raises(ArgumentError, match="block_size"):
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs("tiny", base_url=site.base_url, block_size=16))


async def test_leaving_a_stream_ends_its_request(site: Site, llm: AsyncLLM) -> None:
    """A loop that is left should cancel what it asked for."""
    site.says("cat ", adds_end=False)
    site.worker.step_s = 0.005
    async with aclosing(llm.generate("hi", SamplingParams(max_tokens=400, ignore_eos=True), "0")) as outputs:  # type: ignore[type-var]
        async for _ in outputs:
            break
    await wait_until_async(lambda: _is_at_rest(site), description="the request is gone")


async def _is_at_rest(site: Site) -> bool:
    return not await site.bus.list_live()


async def test_detokenize_gives_each_tokens_text(site: Site) -> None:
    """`return_token_strs` should give the text of each token, beside the text of all; without it nothing is added."""
    ids = site.tokenizer.encode(TEXT).ids[:3]
    _, answer = await site.post("/detokenize", {"tokens": ids, "return_token_strs": True})
    assert answer == {"prompt": "hello world,", "token_strs": ["hello", " world", ","]}
    assert (await site.post("/detokenize", {"tokens": ids}))[1] == {"prompt": "hello world,"}
