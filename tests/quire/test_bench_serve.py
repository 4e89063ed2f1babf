"""`quire bench serve` against a small server that streams what the test tells it to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quire.bench import serve
from quire.bench.serve import BenchConfig
from shared.errors import QuireError


@dataclass
class FakeServer:
    """Streams one event a token; `lost` tokens fewer than asked for; notes bodies and how many ran at once."""

    lost: int = 0
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200 and len(self.bodies) > 1:
            return web.Response(status=self.status, text="no room")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse()
        await response.prepare(request)
        count = body["max_tokens"] - (self.lost if len(self.bodies) > 1 else 0)
        for event in [{"choices": [{"text": ""}]}, *[{"choices": [{"text": "x"}]}] * count]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        self.running -= 1
        return response


@pytest.fixture
async def start() -> AsyncIterator[Callable[[FakeServer], Awaitable[FakeServer]]]:
    servers: list[TestServer] = []

    async def start_one(fake: FakeServer) -> FakeServer:
        async def list_models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "fake-model"}]})

        app = web.Application()
        app.router.add_get("/v1/models", list_models)
        app.router.add_post("/v1/completions", fake.answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        fake.url = str(servers[-1].make_url("")).rstrip("/")
        return fake

    yield start_one
    for server in servers:
        await server.close()


Start = Callable[[FakeServer], Awaitable[FakeServer]]


async def test_figures_of_a_good_run(start: Start) -> None:
    """Every token should be counted once, over all requests of each repeat, and nothing be wrong."""
    fake = await start(FakeServer())
    (report,) = await serve.measure(BenchConfig(base_url=fake.url, workload=("w2",), repeats=2))
    assert report["errors"] == []
    assert [repeat["output_tokens"] for repeat in report["repeats"]] == [4622, 4622]
    assert report["median"]["requests"] == 32
    assert len(fake.bodies) == 1 + 2 * 32
    assert {body["model"] for body in fake.bodies} == {"fake-model"}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in fake.bodies)


async def test_intruder_is_sent_last(start: Start) -> None:
    """w4's long prompt should come when all short streams run, and have its own figures."""
    fake = await start(FakeServer())
    (report,) = await serve.measure(BenchConfig(base_url=fake.url, workload=("w4",), repeats=1))
    assert [len(body["prompt"]) for body in fake.bodies[-9:]] == [32] * 8 + [2048]
    assert report["median"]["long_ttft_ms"] > 0
    assert "longest stall" in serve.format_report(report)


async def test_concurrency_is_a_limit(start: Start) -> None:
    """No more requests than allowed should run at once."""
    fake = await start(FakeServer())
    await serve.measure(BenchConfig(base_url=fake.url, workload=("w2",), repeats=1, concurrency=2))
    assert 1 <= fake.most_running <= 2


async def test_wrong_lengths_are_errors(start: Start) -> None:
    """A server that sends fewer tokens than asked for should be told on, not be called fast."""
    fake = await start(FakeServer(lost=1))
    (report,) = await serve.measure(BenchConfig(base_url=fake.url, workload=("w1",), repeats=1))
    assert report["errors"] == ["127 tokens came, 128 were asked for"]
    assert "FAILED" in serve.format_report(report)


async def test_refusals_are_errors(start: Start) -> None:
    """A refused request should be told with its status, and count as failed."""
    fake = await start(FakeServer(status=503))
    (report,) = await serve.measure(BenchConfig(base_url=fake.url, workload=("w1",), repeats=1))
    assert report["errors"] == ["HTTP 503: no room"]
    text = serve.format_report(report)
    assert "w1: 0 requests in" in text
    assert "nan" not in text
    assert report["median"]["failed"] == 1


async def test_server_that_is_not_there() -> None:
    """An address where nothing listens should be one clear error."""
    with pytest.raises(QuireError, match="does not list its models"):
        await serve.measure(BenchConfig(base_url="http://127.0.0.1:9", repeats=1))
