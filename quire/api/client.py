"""One prompt to one `RequestOutput`, or a stream of them, over the OpenAI-compatible API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from gateway.openai import ChatBody, CompletionBody
from quire.api.connection import Connection
from quire.api.deployment import Deployment
from quire.api.lora_request import AdapterLoader, LoRARequest, check_adapter
from quire.api.outputs import GrowingOutput, LogprobReader, RequestMetrics, RequestOutput, named_ids
from quire.api.prompts import Prompt
from quire.api.sampling_params import RequestOutputKind, SamplingParams, check
from shared.errors import ArgumentError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. `fields`: of its body, without those of `sampling`; `prompt`: its text if that is known."""

    request_id: str
    path: str
    fields: dict[str, Any]
    sampling: SamplingParams
    prompt: str | None = None
    lora_request: LoRARequest | None = None
    arrival_time: float = field(default_factory=time.time)

    @property
    def is_chat(self) -> bool:
        """Whether its prompt is a conversation."""
        return self.path == CHAT

    def body(self) -> dict[str, Any]:
        """The request's body, but for the model."""
        sampling = self.sampling.chat_fields() if self.is_chat else self.sampling.fields()
        names_ids = {} if self.sampling.logprobs is None else {"return_tokens_as_token_ids": True}
        return sampling | self.fields | {"return_token_ids": True} | names_ids


def completion_job(request_id: str, prompt: Prompt, sampling: SamplingParams, **fields: Any) -> Job:
    """The job of one prompt. Raises `ArgumentError`."""
    _check_sampling(sampling)
    adapter = fields.pop("lora_request", None) or prompt.lora_request
    fields["prompt"] = prompt.text if prompt.token_ids is None else list(prompt.token_ids)
    if prompt.cache_salt is not None:
        fields["cache_salt"] = prompt.cache_salt
    job = Job(request_id=request_id, path=COMPLETIONS, fields=_present(fields), sampling=sampling, prompt=prompt.text,
              lora_request=check_adapter(adapter))  # fmt: skip
    check(CompletionBody, job.body(), what="generate()")
    return job


def chat_job(request_id: str, messages: Any, sampling: SamplingParams, **fields: Any) -> Job:
    """The job of one conversation. Raises `ArgumentError`."""
    _check_sampling(sampling)
    adapter = fields.pop("lora_request", None)
    fields["messages"] = messages
    job = Job(request_id=request_id, path=CHAT, fields=_present(fields), sampling=sampling,
              lora_request=check_adapter(adapter))  # fmt: skip
    check(ChatBody, job.body(), what="chat()")
    return job


def _check_sampling(sampling: object) -> None:
    if not isinstance(sampling, SamplingParams):
        raise ArgumentError(f"sampling_params: must be SamplingParams, got {type(sampling).__name__}")


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class Client:
    """Asks `deployment` for `model`, in one event loop. An empty `model` is the first one that is served there."""

    def __init__(self, deployment: Deployment, model: str) -> None:
        self._deployment = deployment
        self._model = model
        self._token_texts: dict[int, str] = {}
        self.connection = Connection(deployment)
        self._adapters = AdapterLoader(deployment, self.connection)

    async def model_card(self) -> dict[str, Any]:
        """What `/v1/models` says of the model. Raises `ArgumentError` when it is not served."""
        cards = orjson.loads(await self.connection.get("/v1/models"))["data"]
        for card in cards:
            if not self._model or card["id"] == self._model:
                self._model = card["id"]
                return dict(card)
        raise ArgumentError(f"model={self._model!r}: is not served there; served: {', '.join(c['id'] for c in cards)}")

    async def default_sampling_params(self) -> SamplingParams:
        """The class' own defaults, and over them the model's."""
        return SamplingParams(**(await self.model_card()).get("default_sampling_params", {}))

    async def complete(self, job: Job) -> RequestOutput:
        """The whole output of `job`. Raises `QuireError`."""
        answer = await self.connection.post(job.path, await self._body(job))
        reading = _Reading(job, self._token_texts)
        await self._learn_texts(job, answer)
        reading.take(answer)
        output = reading.output(finished=True)
        if job.is_chat:
            output.prompt = await self._text_of(output.prompt_token_ids or [])
        return output

    async def stream(self, job: Job) -> AsyncIterator[RequestOutput]:
        """Outputs as they grow, in the way of the job's `output_kind`; the last one is `finished`."""
        kind = job.sampling.output_kind
        if kind is RequestOutputKind.FINAL_ONLY or (job.sampling.best_of or 0) > job.sampling.n:
            yield await self.complete(job)
            return
        reading = _Reading(job, self._token_texts)
        body = await self._body(job) | {"stream_options": {"include_usage": True}}
        async for event in self.connection.events(job.path, body):
            await self._learn_texts(job, event)
            if reading.take(event):
                yield reading.output(finished=False, is_delta=kind is RequestOutputKind.DELTA)
        yield reading.output(finished=True, is_delta=kind is RequestOutputKind.DELTA)

    async def close(self) -> None:
        """Drop all connections."""
        await self.connection.close()

    async def _body(self, job: Job) -> dict[str, Any]:
        if not self._model:
            await self.model_card()
        adapter = job.lora_request
        if adapter is not None:
            await self._adapters.require(adapter, self._model)
        body = job.body() | {"model": self._model if adapter is None else adapter.lora_name}
        if job.sampling.max_tokens is None and not job.is_chat:
            body["max_tokens"] = await self._room_for(job)
        return body

    async def _room_for(self, job: Job) -> int:
        """Tokens that fit behind the prompt."""
        prompt = job.fields["prompt"]
        if isinstance(prompt, str):
            answer = await self.connection.post("/tokenize", {"model": self._model, "prompt": prompt})
            return max(1, int(answer["max_model_len"]) - int(answer["count"]))
        return max(1, int((await self.model_card())["max_model_len"]) - len(prompt))

    async def _learn_texts(self, job: Job, answer: dict[str, Any]) -> None:
        """Ask for the texts of the tokens that logprobs name, of each once."""
        if job.sampling.logprobs is None:
            return
        unknown = sorted(named_ids(answer) - self._token_texts.keys())
        if unknown:
            asked = {"model": self._model, "tokens": unknown, "return_token_strs": True}
            strings = (await self.connection.post("/detokenize", asked)).get("token_strs") or ()
            self._token_texts.update(zip(unknown, strings, strict=False))

    async def _text_of(self, token_ids: list[int]) -> str:
        answer = await self.connection.post("/detokenize", {"model": self._model, "tokens": token_ids})
        return str(answer["prompt"])


class _Reading:
    """Puts the answer to one job together."""

    def __init__(self, job: Job, token_texts: dict[int, str]) -> None:
        self._job = job
        reader = LogprobReader(texts=token_texts, num_top=job.sampling.logprobs or 0)
        self._choices = [GrowingOutput(index, reader) for index in range(job.sampling.n)]
        self._shown = [choice.mark() for choice in self._choices]
        self._prompt_ids: list[int] | None = None
        self._num_cached: int | None = None
        self._metrics = RequestMetrics(arrival_time=job.arrival_time)

    def take(self, answer: dict[str, Any]) -> bool:
        """Whether the chunk or answer brings more of the output, and more will follow."""
        self._prompt_ids = answer.get("prompt_token_ids", self._prompt_ids)
        if answer.get("usage"):
            self._num_cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        brings = False
        for choice in answer["choices"]:
            self._choices[choice["index"]].add(choice)
            self._prompt_ids = choice.get("prompt_token_ids", self._prompt_ids)
            brings = brings or bool(choice.get("token_ids") or choice["finish_reason"])
        return brings and any(choice.finish_reason is None for choice in self._choices)

    def output(self, *, finished: bool, is_delta: bool = False) -> RequestOutput:
        """What there is so far, or since the last call."""
        now = time.time()
        times = {"finished_time": now} if finished else {"first_token_time": self._metrics.first_token_time or now}
        self._metrics = replace(self._metrics, **times)
        outputs = [choice.shown(mark) for choice, mark in zip(self._choices, self._shown, strict=True)]
        if is_delta:
            self._shown = [choice.mark() for choice in self._choices]
        return RequestOutput(
            request_id=self._job.request_id,
            prompt=self._job.prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=outputs,
            finished=finished,
            metrics=self._metrics,
            lora_request=self._job.lora_request,
            num_cached_tokens=self._num_cached,
        )
