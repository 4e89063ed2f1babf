"""A cell for tests of the worker: a bus, workers on a scripted model, and the test itself as gateway and leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker.service import Place, WorkerService
from shared.bus import Bus, NewRequest, RequestRecord, RequestState
from shared.config import EngineConfig, ModelConfig, ProcessConfig, WorkerConfig
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId, new_request_id
from shared.log import FinishEntry, decode_entries
from shared.messages import PreemptRequest, RequestBody, SamplingParams, SubmitRequest, WorkerReport
from tests.scripted_runner import ScriptedRunner, solo_output
from tests.waiting import wait_until_async

TOKEN = "the leader's"


async def wait_until(condition: Callable[[], object], *, description: str, stepping: Worker | None = None) -> None:
    """Turn the loop until `condition()` is true; a gated worker may step meanwhile."""

    async def ask() -> object:
        return condition() or _step(stepping)

    await wait_until_async(ask, description=description, timeout_s=10)


@dataclass(slots=True, kw_only=True)
class Worker:
    """One running service. `reports` are those it sent, over all of its incarnations."""

    runner: ScriptedRunner
    place: Place
    stop: asyncio.Event
    task: asyncio.Task[None] = field(init=False)
    reports: list[WorkerReport] = field(default_factory=list)

    @property
    def worker_id(self) -> WorkerId:
        """Of the incarnation that reported last."""
        return self.reports[-1].worker_id

    @property
    def is_idle(self) -> bool:
        """Whether the last report shows nothing held and all blocks free."""
        last = self.reports[-1]
        num_swap_blocks = 0 if self.runner.host_memory is None else self.runner.host_memory.num_blocks
        is_empty = last.free_blocks == last.num_blocks == self.runner.num_blocks
        return not last.held and is_empty and last.free_swap_blocks == num_swap_blocks


class Cell:
    """See the module. Use as an async context: its end stops every worker, whatever they hold."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.workers: list[Worker] = []
        self._ranks = 0

    async def __aenter__(self) -> Cell:
        assert await self.bus.take_lead(TOKEN, await self.bus.read_leader())
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.runner.open()
            worker.task.cancel()
        await asyncio.gather(*(worker.task for worker in self.workers), return_exceptions=True)

    async def start_worker(
        self, runner: ScriptedRunner | None = None, *, drain_s: float = 5.0, max_num_batched_tokens: int = 64,
        has_adapters: bool = False,
    ) -> Worker:  # fmt: skip
        """A worker that has said hello and reported."""
        config = WorkerConfig(
            process=ProcessConfig(drain_s=drain_s, worker_lease_s=0.3),
            model=ModelConfig(model="/models/scripted"),
            engine=EngineConfig(max_num_batched_tokens=max_num_batched_tokens, enable_lora=has_adapters),
        )
        place = Place(first_id=WorkerId(f"w{len(self.workers)}:1"))
        worker = Worker(runner=runner or ScriptedRunner(), place=place, stop=asyncio.Event())
        service = WorkerService(self.bus, config, worker.runner, worker.place, worker.reports.append)
        worker.task = asyncio.create_task(service.run(worker.stop))
        self.workers.append(worker)
        await wait_until(lambda: worker.reports, description="the first report")
        return worker

    async def submit(
        self, *prompts: tuple[int, ...], n: int = 1, max_tokens: int = 12, adapter: str = "", **sampling: object
    ) -> RequestId:
        """A stored request with one listener."""
        prompts = prompts or ((1, 2, 3, 4, 5),)
        request_id = new_request_id("completion")
        params = SamplingParams(**{"seed": 7, "max_tokens": max_tokens, **sampling})  # type: ignore[arg-type]
        await self.bus.submit(
            NewRequest(
                summary=SubmitRequest(
                    request_id=request_id, tenant="t", model="scripted", fingerprint="scripted",
                    prompt_lens=tuple(map(len, prompts)), n=n, max_tokens=max_tokens,
                ),
                body=RequestBody(
                    kind="completion", model="scripted", created=0, prompts=prompts, n=n, sampling=params,
                    adapter=adapter, adapter_path=f"/adapters/{adapter}",
                ),
                gateway_id=GatewayId("g:1"),
                connection_id=ConnectionId("c"),
            )
        )  # fmt: skip
        return request_id

    async def dispatch(self, request_id: RequestId, worker: Worker) -> EntryId:
        """Send a queued request to a worker, behind all earlier ones in rank."""
        self._ranks += 1
        outcome = await self.bus.dispatch(TOKEN, request_id, worker.worker_id, self._ranks)
        assert outcome.entry_id is not None, outcome
        return outcome.entry_id

    async def run(self, worker: Worker, *args: tuple[int, ...], **kwargs: object) -> RequestId:
        """Submit and dispatch."""
        request_id = await self.submit(*args, **kwargs)  # type: ignore[arg-type]
        await self.dispatch(request_id, worker)
        return request_id

    async def record(self, request_id: RequestId) -> RequestRecord:
        record = await self.bus.load_record(request_id)
        assert record is not None
        return record

    async def wait_for_state(
        self, request_id: RequestId, state: RequestState, *, stepping: Worker | None = None
    ) -> RequestRecord:
        """The record, once it has that state; a gated worker may step meanwhile."""

        async def is_there() -> bool:
            return (await self.record(request_id)).state is state or _step(stepping)

        await wait_until_async(is_there, description=f"{request_id} is {state}", timeout_s=10)
        return await self.record(request_id)

    async def logged(self, request_id: RequestId, choice: int = 0) -> list[int]:
        """Token ids in the log of one choice."""
        entries = decode_entries(await self.bus.read_log(request_id))
        return [e.token_id for e in entries if e.choice == choice and not isinstance(e, FinishEntry)]

    async def wait_for_tokens(
        self, request_id: RequestId, count: int, *, choice: int = 0, stepping: Worker | None = None
    ) -> None:
        """Until the log of `choice` holds at least `count` tokens; a gated worker may step meanwhile."""

        async def are_there() -> bool:
            return len(await self.logged(request_id, choice)) >= count or _step(stepping)

        await wait_until_async(are_there, description=f"{count} tokens of {request_id}", timeout_s=10)

    async def preempt(self, worker: Worker, request_id: RequestId) -> RequestRecord:
        """Preempt a request of a gated worker by its last report, and let the worker step until it gave it back."""
        attempt, seq = (await self.record(request_id)).attempt, worker.reports[-1].seq
        message = PreemptRequest(request_id=request_id, attempt=attempt, report_seq=seq)
        await self.bus.preempt(TOKEN, worker.worker_id, message)
        return await self.wait_for_state(request_id, RequestState.QUEUED, stepping=worker)

    async def assert_as_solo(self, *request_ids: RequestId) -> None:
        """Each ends finished, and its log holds, for each choice, just the tokens and the end of an undisturbed run."""
        for request_id in request_ids:
            record = await self.wait_for_state(request_id, RequestState.ENDED)
            assert record.ended is not None
            assert record.ended.reason == "finished", record.ended
            body = await self.bus.load_body(request_id)
            assert body is not None
            entries = decode_entries(await self.bus.read_log(request_id))
            for choice in range(len(record.choices)):
                prompt = list(body.prompts[choice // body.n])
                tokens, finish = solo_output(prompt, choice, body.sampling, ScriptedRunner.max_model_len)
                assert await self.logged(request_id, choice) == tokens
                assert [e for e in entries if isinstance(e, FinishEntry) and e.choice == choice] == [
                    FinishEntry(choice, finish)
                ]
                assert record.choices[choice].finish == finish


def _step(worker: Worker | None) -> bool:
    """Let the step go that waits; False, since what is waited for has not happened yet."""
    if worker is not None:
        worker.runner.permit_waiting()
    return False
