"""`AsyncLLM`: outputs that grow while they are generated, for programs with an event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from quire.api.client import Client, Job, chat_job, completion_job
from quire.api.deployment import open_deployment
from quire.api.lora_request import LoRARequest
from quire.api.metrics import Metric, read_metrics
from quire.api.outputs import CompletionOutput, RequestOutput
from quire.api.prompts import read_prompt
from quire.api.sampling_params import RequestOutputKind, SamplingParams
from shared.errors import ArgumentError


class AsyncEngineArgs:
    """The arguments of an `AsyncLLM`, for `AsyncLLM.from_engine_args`: the older way to make one."""

    def __init__(self, model: str = "", **arguments: Any) -> None:
        self.arguments = {"model": model, **arguments}


class AsyncLLM:
    """As `LLM`, whose arguments it takes; making one waits until the model is loaded. Used in one event loop."""

    def __init__(
        self, model: str = "", *, base_url: str | None = None, api_key: str | None = None, **arguments: Any
    ) -> None:
        self._deployment = open_deployment(str(model), base_url, api_key, arguments)
        self._client = Client(self._deployment, "" if base_url is None else str(model))
        self._streams: dict[str, _OpenStream] = {}
        self._finalizer = weakref.finalize(self, self._deployment.stop)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> Self:
        """One with these arguments."""
        return cls(**engine_args.arguments)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt as they grow, the last one `finished`; each holds all so far, unless `output_kind` says
        otherwise. Leaving the loop ends the request.

        Raises:
            ArgumentError, RequestFailed, DeploymentError: as `LLM.generate`.
        """
        sampling = sampling_params or await self.get_default_sampling_params()
        job = completion_job(request_id, read_prompt(prompt), sampling, lora_request=lora_request, priority=priority)
        async for output in self._follow(job):
            yield output

    async def chat(
        self, messages: Sequence[Any], sampling_params: SamplingParams | None, request_id: str, **fields: Any
    ) -> AsyncIterator[RequestOutput]:
        """The same for the next message of a conversation; `fields` as in `LLM.chat`."""
        sampling = sampling_params or await self.get_default_sampling_params()
        async for output in self._follow(chat_job(request_id, messages, sampling, **fields)):
            yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; whoever iterates over one gets what there is, with finish reason "abort". Unknown ids are
        those of requests that have ended."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if name in self._streams:
                await self._streams[name].abort()

    async def get_default_sampling_params(self) -> SamplingParams:
        """As `LLM.get_default_sampling_params`."""
        return await self._client.default_sampling_params()

    async def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`."""
        return read_metrics((await self._client.connection.get("/metrics")).decode())

    async def shutdown(self) -> None:
        """As `LLM.shutdown`."""
        await self.abort(list(self._streams))
        await self._client.close()
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _follow(self, job: Job) -> AsyncIterator[RequestOutput]:
        if job.request_id in self._streams:
            raise ArgumentError(f"request_id={job.request_id!r}: is in use by a request that runs")
        stream = self._streams[job.request_id] = _OpenStream(self._client, job)
        try:
            async for output in stream.outputs():
                yield output
        finally:
            del self._streams[job.request_id]
            await stream.close()


AsyncLLMEngine = AsyncLLM
"""The older name."""


class _OpenStream:
    """One request that runs: a task reads the stream, so that it can be ended from elsewhere."""

    def __init__(self, client: Client, job: Job) -> None:
        self._job = job
        self._newest: RequestOutput | None = None
        self._is_aborted = False
        self._queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._read(client))
        self._task.add_done_callback(lambda _: self._queue.put_nowait(None))

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """All of them. Raises what reading them raised."""
        while (output := await self._queue.get()) is not None:
            yield output
        if not self._is_aborted:
            self._task.result()
        elif self._newest is None or not self._newest.finished:
            yield self._aborted()

    async def abort(self) -> None:
        """Let what has come so far be all."""
        self._is_aborted = True
        await self.close()

    async def close(self) -> None:
        """End the request, unless it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, client: Client) -> None:
        async for output in client.stream(self._job):
            self._newest = output
            self._queue.put_nowait(output)

    def _aborted(self) -> RequestOutput:
        """The last output: the newest one once more, or nothing new where outputs hold only that."""
        nothing = [CompletionOutput(index, "", []) for index in range(self._job.sampling.n)]
        is_delta = self._job.sampling.output_kind is RequestOutputKind.DELTA
        known = nothing if self._newest is None or is_delta else self._newest.outputs
        outputs = [replace(output, finish_reason=output.finish_reason or "abort") for output in known]
        job = self._job
        newest = self._newest or RequestOutput(job.request_id, job.prompt, None, outputs, finished=True)
        return replace(newest, outputs=outputs, finished=True)
