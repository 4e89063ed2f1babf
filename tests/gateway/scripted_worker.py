"""A worker without a model, and a leader without a policy: honest partners on the bus for tests of the gateway."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from shared.bus import Bus, CommitAnswer, CommitItem, CommitOutcome, DispatchAnswer, LeaderPulse
from shared.ids import EntryId, RequestId, WorkerId, new_incarnation, new_leader_token
from shared.log import FinishEntry, LogEntry, Logprobs, TokenEntry, decode_entries, encode_entry
from shared.messages import HeldRequest, RequestBody, RunRequest, WorkerHello, WorkerReport

Script = Callable[[RequestBody, int], Sequence[int]]
TICK_S = 0.1


class ScriptedWorker:
    """Commits the tokens that `script(body, choice)` lists, one a step, and what follows from the sampling parameters:
    an end token or `max_tokens` ends a choice. A script that runs out draws `end_id`.

    `pace` is set while the worker may draw; clear it to hold all requests where they are.
    """

    def __init__(self, bus: Bus, script: Script, end_id: int, **hello: object) -> None:
        self.bus = bus
        self.script = script
        self.end_id = end_id
        self.pace = asyncio.Event()
        self.pace.set()
        self.step_s = 0.0
        self.max_drawn: int | None = None
        self.num_steps = 0
        self.num_ended_early = 0
        self.num_cached: Callable[[int], int] = lambda choice: 0
        self.embed: Callable[[Sequence[int]], list[float]] = lambda prompt: [len(prompt), prompt[-1]]
        self.logprob: Callable[[int, int], float] = lambda choice, position: -0.5 - position / 10
        self.bodies: list[RequestBody] = []
        self.worker_id = WorkerId(new_incarnation(f"worker-{id(self)}"))
        settings = {"model": "tiny", "fingerprint": "f1", "dtype": "float32", "device": "cpu", "max_model_len": 512,
                    "block_size": 16, "num_blocks": 64, "max_num_seqs": 8, "pid": 1, "host": "here"}  # fmt: skip
        self.hello = WorkerHello(worker_id=self.worker_id, **(settings | hello))  # type: ignore[arg-type]
        self._held: dict[RequestId, RunRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_inbox_id = EntryId("0-0")
        self._report_seq = 0

    async def start(self) -> None:
        """Say hello and begin to serve."""
        await self.bus.hello(self.hello)
        for loop in (self._read_inbox(), self._beat()):
            self._spawn(loop)

    async def stop(self) -> None:
        """Fall silent, as a dead worker does."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_inbox(self) -> None:
        while True:
            for entry_id, message in await self.bus.read_inbox(self.worker_id, self._last_inbox_id, 10, 200):
                self._last_inbox_id = entry_id
                if isinstance(message, RunRequest):
                    self._held[message.request_id] = message
                    self._spawn(self._run(message))
                await self.bus.ack_inbox(self.worker_id, [entry_id])

    async def _beat(self) -> None:
        while True:
            held = [(r.request_id, r.attempt) for r in self._held.values()]
            await self.bus.beat(self.worker_id, self.num_steps, held)
            await self.report()
            await asyncio.sleep(TICK_S)

    async def report(self) -> None:
        """Tell what is held: one block a request."""
        self._report_seq += 1
        held = tuple(
            HeldRequest(request_id=r.request_id, attempt=r.attempt, num_blocks=1, num_tokens=1,
                        num_running=len(r.choices), num_waiting=0) for r in self._held.values())  # fmt: skip
        await self.bus.report(WorkerReport(
            worker_id=self.worker_id, seq=self._report_seq, last_inbox_id=self._last_inbox_id, held=held,
            free_blocks=self.hello.num_blocks - len(held), num_blocks=self.hello.num_blocks, num_steps=self.num_steps,
            num_running=sum(h.num_running for h in held)))  # fmt: skip

    async def _run(self, message: RunRequest) -> None:
        body = await self.bus.load_body(message.request_id)
        assert body is not None
        self.bodies.append(body)
        try:
            await self._generate(message, body)
        finally:
            self._held.pop(message.request_id, None)
            await self.report()

    async def _generate(self, message: RunRequest, body: RequestBody) -> None:
        """One token a step and choice, from where the log stands, until each choice ends."""
        logged = decode_entries(await self.bus.read_log(message.request_id))
        drawn = {choice: sum(entry.choice == choice for entry in logged) for choice in message.choices}
        scripts = {choice: list(self.script(body, choice)) for choice in message.choices}
        while drawn:
            await self.pace.wait()
            await asyncio.sleep(self.step_s)
            if self.max_drawn is not None and max(drawn.values()) >= self.max_drawn:
                await asyncio.Event().wait()
            choices = list(drawn)
            entries = [self._draw(body, c, drawn[c], scripts[c]) for c in choices]
            self.num_steps += 1
            for choice, outcome in zip(choices, await self._commit(message, drawn, entries), strict=True):
                drawn[choice] += 1
                if outcome.answer is not CommitAnswer.OK:
                    self.num_ended_early += 1
                if outcome.answer is not CommitAnswer.OK or isinstance(entries[choices.index(choice)][-1], FinishEntry):
                    del drawn[choice]

    async def _commit(
        self, message: RunRequest, drawn: dict[int, int], entries: list[list[LogEntry]]
    ) -> list[CommitOutcome]:
        items = [
            CommitItem(
                request_id=message.request_id, attempt=message.attempt, choice=choice, start=drawn[choice],
                entries=tuple(map(encode_entry, new)),
                finish=new[-1].reason if isinstance(new[-1], FinishEntry) else "")
            for choice, new in zip(drawn, entries, strict=True)]  # fmt: skip
        return await self.bus.commit(self.worker_id, items)

    def _draw(self, body: RequestBody, choice: int, position: int, script: Sequence[int]) -> list[LogEntry]:
        if body.kind == "embedding":
            return [FinishEntry(choice, "stop", array("f", self.embed(body.prompts[choice])).tobytes())]
        token_id = script[position] if position < len(script) else self.end_id
        logprobs = None
        if body.sampling.num_logprobs is not None:
            top = tuple((i, -1.0 - i) for i in range(body.sampling.num_logprobs))
            logprobs = Logprobs(self.logprob(choice, position), top)
        num_cached = self.num_cached(choice) if position == 0 else 0
        entries: list[LogEntry] = [TokenEntry(choice, token_id, logprobs, num_cached)]
        if token_id in body.sampling.stop_token_ids:
            entries.append(FinishEntry(choice, "stop"))
        elif position + 1 == body.sampling.max_tokens:
            entries.append(FinishEntry(choice, "length"))
        return entries


class PlainLeader:
    """Leads, and gives every request to the one worker it was told of."""

    def __init__(self, bus: Bus, worker_id: WorkerId) -> None:
        self.bus = bus
        self.worker_id = worker_id
        self.token = new_leader_token()
        self.is_dispatching = asyncio.Event()
        self.is_dispatching.set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take the lead and begin to dispatch."""
        assert await self.bus.take_lead(self.token, LeaderPulse())
        self._tasks = [asyncio.create_task(self._dispatch()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        """Fall silent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await self.bus.raise_lead(self.token, int(asyncio.get_running_loop().time() * 1000))
            await asyncio.sleep(TICK_S)

    async def _dispatch(self) -> None:
        while True:
            for entry_id, summary in await self.bus.read_submits("leader", 10, 200):
                await self.is_dispatching.wait()
                outcome = await self.bus.dispatch(self.token, summary.request_id, self.worker_id, 0)
                assert outcome.answer in (DispatchAnswer.OK, DispatchAnswer.ENDED)
                await self.bus.ack_submits([entry_id])
