"""What `quire bench gateway` sends to a cell, and what each load costs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.bench.mock_cell import CpuTimes, MockCell
from quire.bench.mock_worker import MODEL_NAME
from quire.bench.statistics import percentile
from quire.bench.stream_client import StreamAnswer, send
from quire.bench.workloads import HIGHEST_TOKEN_ID_TINY, LOWEST_TOKEN_ID

PROMPT_TOKENS = 32


class ServiceLoad:
    """Sends streams to the gateways of `cell` in turn and checks every answer.

    Args:
        model: folder with the tokenizer that the gateways use.
    """

    def __init__(self, cell: MockCell, model: Path) -> None:
        self._cell = cell
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._draw = random.Random(0)
        self._next_port = 0
        self.errors: list[str] = []

    async def warm_up(self) -> None:
        """A few requests, so that scripts are loaded and code is warm."""
        await asyncio.gather(*(self._stream(8) for _ in range(4 * len(self._cell.ports))))

    async def streams(self, num_streams: int, num_tokens: int, num_rounds: int) -> dict[str, Any]:
        """`num_streams` at once, `num_rounds` times: CPU time a token, and how it was shared."""
        answers: list[StreamAnswer] = []

        async def run() -> None:
            for _ in range(num_rounds):
                answers.extend(await asyncio.gather(*(self._stream(num_tokens) for _ in range(num_streams))))

        gateways_before = self._cell.gateway_cpu()
        used, wall_s = await self._timed(run)
        gateways = [now - before for now, before in zip(self._cell.gateway_cpu(), gateways_before, strict=True)]
        total = num_streams * num_tokens * num_rounds
        return {
            "streams": num_streams,
            "tokens": total,
            "tokens_per_s": total / wall_s,
            "tokens_per_read": total / sum(answer.num_reads for answer in answers),
            "us_per_token": {name: 1e6 * seconds / total for name, seconds in used.items()},
            "gateway_shares": [seconds / sum(gateways) for seconds in gateways],
        }

    async def first_tokens(self, num_requests: int) -> dict[str, Any]:
        """One request after another: time to the first event."""
        answers = [await self._stream(1) for _ in range(num_requests)]
        times_ms = [1000 * (answer.first_at - answer.sent_at) for answer in answers]
        return {
            "requests": num_requests,
            "ttft_ms_p50": percentile(times_ms, 50),
            "ttft_ms_p99": percentile(times_ms, 99),
        }

    async def requests(self, num_requests: int, concurrency: int) -> dict[str, Any]:
        """`num_requests` of one token, `concurrency` at a time: CPU time a request."""
        slots = asyncio.Semaphore(concurrency)

        async def send_one() -> None:
            async with slots:
                await self._stream(1)

        async def run() -> None:
            await asyncio.gather(*(send_one() for _ in range(num_requests)))

        used, wall_s = await self._timed(run)
        return {
            "requests": num_requests,
            "requests_per_s": num_requests / wall_s,
            "us_per_request": {name: 1e6 * seconds / num_requests for name, seconds in used.items()},
            "dispatches_per_core_s": num_requests / used["scheduler"],
        }

    async def idle(self, seconds: float) -> dict[str, Any]:
        """Nothing for `seconds`."""
        used, wall_s = await self._timed(lambda: asyncio.sleep(seconds))
        return {"wall_s": wall_s, "ms_per_s": {name: 1000 * value / wall_s for name, value in used.items()}}

    async def _timed(self, run: Callable[[], Awaitable[None]]) -> tuple[CpuTimes, float]:
        """CPU seconds by part and wall seconds that `run` took."""
        before, started_at = self._cell.cpu(), time.perf_counter()
        await run()
        wall_s = time.perf_counter() - started_at
        # A thread that ended meanwhile has taken its time along: never less than nothing.
        return {name: max(0.0, now - before[name]) for name, now in self._cell.cpu().items()}, wall_s

    async def _stream(self, num_tokens: int) -> StreamAnswer:
        prompt = [self._draw.randrange(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID_TINY) for _ in range(PROMPT_TOKENS)]
        port = self._cell.ports[self._next_port]
        self._next_port = (self._next_port + 1) % len(self._cell.ports)
        body = {
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        answer = await send(port, "/v1/completions", body)
        self._check(answer, prompt, num_tokens)
        return answer

    def _check(self, answer: StreamAnswer, prompt: list[int], num_tokens: int) -> None:
        """The mock model echoes the prompt; note any other answer."""
        expected = self._tokenizer.decode([prompt[i % len(prompt)] for i in range(num_tokens)])
        try:
            events = answer.events()
        except ValueError as error:
            self.errors.append(str(error))
            return
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        if text != expected:
            self.errors.append(f"another text came: {text[:40]!r} instead of {expected[:40]!r}")
        if events[-1]["usage"]["completion_tokens"] != num_tokens:
            self.errors.append(f"the usage is wrong: {events[-1]['usage']}")
