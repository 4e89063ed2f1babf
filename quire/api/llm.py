"""`LLM`: prompts in, texts out, in one blocking call."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from quire.api.client import Client, Job, chat_job, completion_job
from quire.api.deployment import Deployment, open_deployment
from quire.api.loop_thread import LoopThread
from quire.api.lora_request import LoRARequest
from quire.api.metrics import Metric, read_metrics
from quire.api.outputs import RequestOutput
from quire.api.progress import Bar, open_bar
from quire.api.prompts import read_prompts
from quire.api.sampling_params import SamplingParams
from quire.api.tokenizer import RemoteTokenizer
from shared.errors import ArgumentError

MAX_IN_FLIGHT = 256
"""Requests at a time, each with a connection: twice what a worker has in a step by default, and far below the open
files that a process may have (1,024 where nobody raised that)."""

Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model, with services of its own that end with this object or its process, or of a running deployment.

    Args:
        model: a checkpoint's folder; empty: the small default model. With `base_url` the name that it has there; empty:
            the first one.
        base_url: of a running deployment, with or without /v1.
        api_key: for that.
        arguments: the flags of `quire serve`, by vLLM's names (docs/python.md).

    Raises:
        ArgumentError: an argument is wrong, or not built; also a `ValueError`.
        DeploymentError: the services cannot be started or reached.
    """

    def __init__(
        self, model: str = "", *, base_url: str | None = None, api_key: str | None = None, **arguments: Any
    ) -> None:
        self._deployment = open_deployment(str(model), base_url, api_key, arguments)
        self._thread = LoopThread()
        self._client = Client(self._deployment, "" if base_url is None else str(model))
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, _shut_down, self._client, self._thread, self._deployment)
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            self._thread.run(self._client.model_card())
            undo.pop_all()

    @property
    def base_url(self) -> str:
        """Where the deployment listens, for other clients of this machine; without /v1."""
        return self._deployment.url

    @property
    def api_key(self) -> str | None:
        """What it wants as a bearer token."""
        return self._deployment.api_key

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Params = None,
        prompt_token_ids: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of `prompts`, in their order.

        Args:
            prompts: texts, lists of token ids, dicts with `prompt` or `prompt_token_ids`, or one of them.
            sampling_params: for all, or one for each; None: `get_default_sampling_params()`.
            prompt_token_ids: the older way to give token ids, of one prompt or of several.
            use_tqdm: whether to show progress, or a class to show it with.
            lora_request: for all, or one for each.
            priority: of each, lower first.

        Raises:
            ArgumentError: something of it is wrong; nothing has been computed, or nothing is kept.
            RequestFailed: a request was accepted and could not be finished.
            DeploymentError: the services have ended, or do not answer.
        """
        found = read_prompts(prompts, prompt_token_ids)
        params = self._spread("sampling_params", self._or_default(sampling_params), len(found))
        adapters = self._spread("lora_request", lora_request, len(found))
        ranks = self._spread("priority", priority, len(found))
        jobs = [
            completion_job(str(next(self._ids)), prompt, sampling, lora_request=adapter, priority=rank)
            for prompt, sampling, adapter, rank in zip(found, params, adapters, ranks, strict=True)
        ]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """The next message of one conversation, or of each of several; otherwise as `generate`.

        Args:
            messages: dicts with `role` and `content`, or a list of such lists.
            fields: further fields of a chat request, as the HTTP API has them.
        """
        is_one = len(messages) > 0 and isinstance(messages[0], dict)
        conversations = [messages] if is_one else list(messages)
        params = self._spread("sampling_params", self._or_default(sampling_params), len(conversations))
        adapters = self._spread("lora_request", lora_request, len(conversations))
        jobs = [
            chat_job(str(next(self._ids)), conversation, sampling, lora_request=adapter, **fields)
            for conversation, sampling, adapter in zip(conversations, params, adapters, strict=True)
        ]
        return self._run(jobs, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where none are given: the class' defaults, and over them the model's generation_config.json."""
        return self._thread.run(self._client.default_sampling_params())

    def get_tokenizer(self) -> RemoteTokenizer:
        """The model's tokenizer and chat template."""
        return RemoteTokenizer(lambda path, body: self._thread.run(self._client.connection.post(path, body)))

    def get_metrics(self) -> list[Metric]:
        """The deployment's metrics, as `/metrics` has them."""
        return read_metrics(self._thread.run(self._client.connection.get("/metrics")).decode())

    def shutdown(self) -> None:
        """End all that is in flight, and the services if they are this object's own. Harmless when done before."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, jobs: list[Job], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        if not (self._finalizer.alive and self._thread.is_alive):
            raise ArgumentError("this LLM has been shut down, or is a fork's copy; make a new one")
        bar = open_bar(use_tqdm, len(jobs))
        try:
            return self._thread.run(_complete_all(self._client, jobs, bar))
        finally:
            bar.close()

    def _or_default(self, params: Params) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    @staticmethod
    def _spread(name: str, value: Any, count: int) -> list[Any]:
        """`value` for each of `count` prompts, or its items if it has one for each."""
        if not isinstance(value, list | tuple):
            return [value] * count
        if len(value) != count:
            raise ArgumentError(f"{name}: {len(value)} of them for {count} prompts; give one for all, or one for each")
        return list(value)


async def _complete_all(client: Client, jobs: list[Job], bar: Bar) -> list[RequestOutput]:
    """All outputs in order; the first failure cancels the rest."""
    room = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def complete(job: Job) -> RequestOutput:
        async with room:
            output = await client.complete(job)
        bar.update(1)
        return output

    tasks = [asyncio.ensure_future(complete(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shut_down(client: Client, thread: LoopThread, deployment: Deployment) -> None:
    if thread.is_alive:
        thread.run(client.close())
        thread.close()
    deployment.stop()
