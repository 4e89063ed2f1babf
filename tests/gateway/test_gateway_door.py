"""Who is let in: limits of the queue and of each tenant over HTTP, what a refusal says, and how metrics count it."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from gateway.door import Door
from gateway.errors import REFUSAL_REASONS
from gateway.pace import WINDOW_S, Pace
from shared.bus import BusLimits, SubmitAnswer, SubmitOutcome
from shared.clock import ManualClock
from shared.config import DoorConfig, GatewayConfig, load
from shared.errors import ConfigError, Overloaded
from shared.ids import RequestId
from shared.limits import QueueDepth, RefusalReason, TenantLimits, parse_tenant_limits
from shared.memory_bus import MemoryBus
from tests.gateway.conftest import Site, SiteMaker
from tests.waiting import wait_until_async

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": [5, 6, 7, 8], "max_tokens": 6}
"""10 tokens."""


async def ask(site: Site, *, key: str = "", **fields: Any) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers (in lower case) of a completion."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = site.base_url + COMPLETIONS
    async with site.http.post(url, json=ASKED | fields, headers=headers) as response:
        return response.status, await response.json(), {k.lower(): v for k, v in response.headers.items()}


async def metric(site: Site, name: str) -> dict[str, float]:
    """The samples of a metric: labels as text → value."""
    async with site.http.get(site.base_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(name + "{"))
    return {labels: float(value) for labels, _, value in found}


async def refusals(site: Site) -> dict[str, float]:
    """Refusals by reason, those that there were."""
    samples = await metric(site, "quire:requests_refused_total")
    by_reason = {labels.partition('reason="')[2].partition('"')[0]: value for labels, value in samples.items()}
    assert set(by_reason) == set(REFUSAL_REASONS)
    return {reason: value for reason, value in by_reason.items() if value}


async def wait_for_queue(site: Site, depth: QueueDepth) -> None:
    async def is_so_deep() -> bool:
        return await site.bus.read_queue() == depth

    await wait_until_async(is_so_deep, description=f"a queue of {depth}")


@pytest.mark.parametrize(("limits", "reason"), [
    (BusLimits(max_queued_requests=2), "queued_requests"), (BusLimits(max_queued_tokens=8), "queued_tokens")
])  # fmt: skip
async def test_a_full_queue_is_503(make_site: SiteMaker, limits: BusLimits, reason: str) -> None:
    """While as much waits as may, more should be a 503 with Retry-After; what waits be served, and then others."""
    site = await make_site(bus=MemoryBus(limits))
    site.leader.is_dispatching.clear()
    waiting = [asyncio.create_task(ask(site)) for _ in range(2)]
    await wait_for_queue(site, QueueDepth(num_sequences=2, num_tokens=8))
    assert [*(await metric(site, "quire:num_queued_tokens")).values()] == [8.0]
    assert [*(await metric(site, "quire:num_queued_sequences")).values()] == [2.0]
    for stream in (False, True):
        status, answer, headers = await ask(site, stream=stream)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "server_error", "overloaded")
        assert "queued" in answer["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= 60
    assert len(await site.bus.list_live()) == 2
    assert await refusals(site) == {reason: 2.0}
    site.leader.is_dispatching.set()
    assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200, 200]
    assert (await ask(site))[0] == 200


async def test_requests_per_minute_are_429(make_site: SiteMaker) -> None:
    """Beyond a minute's requests a tenant should get OpenAI's error and how long to wait; before, what is left."""
    site = await make_site(tenant_requests_per_minute=3)
    for left in (2, 1, 0):
        status, _, headers = await ask(site)
        assert (status, headers["x-ratelimit-limit-requests"]) == (200, "3")
        assert headers["x-ratelimit-remaining-requests"] == str(left)
        assert headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in headers
    for stream in (False, True):
        status, answer, headers = await ask(site, stream=stream)
        error = answer["error"]
        assert (status, error["type"], error["code"]) == (429, "requests", "rate_limit_exceeded")
        assert error.keys() == {"message", "type", "param", "code"}
        assert "requests per minute: at most 3" in error["message"]
        assert 10 <= int(headers["retry-after"]) <= 20
        assert headers["x-ratelimit-remaining-requests"] == "0"
    assert await refusals(site) == {"tenant_requests": 2.0}
    assert await site.bus.list_live() == set()


async def test_a_stream_tells_what_is_left(make_site: SiteMaker) -> None:
    """The headers of a stream should hold the tenant's budget, too."""
    site = await make_site(tenant_tokens_per_minute=100)
    async with site.http.post(site.base_url + COMPLETIONS, json=ASKED | {"stream": True}) as response:
        assert response.headers["x-ratelimit-limit-tokens"] == "100"
        assert response.headers["x-ratelimit-remaining-tokens"] == "90"
        await response.read()


async def test_tokens_per_minute_are_429(make_site: SiteMaker) -> None:
    """Tokens should be reserved with max_tokens, what was not generated be given back, and more be a 429."""
    site = await make_site(tenant_tokens_per_minute=40)
    site.says([5, 6])
    for _ in range(3):
        assert (await ask(site, max_tokens=20))[0] == 200  # each reserves 24, and is 7 with its end token
    status, answer, headers = await ask(site, max_tokens=20)
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, "tokens", "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 8
    assert await refusals(site) == {"tenant_tokens": 1.0}


async def test_more_than_a_minutes_tokens_is_400(make_site: SiteMaker) -> None:
    """A request that its tenant's limit never allows should be refused for good, with both numbers."""
    site = await make_site(tenant_tokens_per_minute=40)
    status, answer, headers = await ask(site, max_tokens=37)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert "41" in answer["error"]["message"]
    assert "40" in answer["error"]["message"]
    assert "retry-after" not in headers
    assert (await ask(site, n=7))[0] == 400
    assert (await ask(site, n=6))[0] == 200
    assert await refusals(site) == {}


async def test_requests_in_flight_are_429(make_site: SiteMaker) -> None:
    """A tenant with as many requests as it may have should get a 429, and be served again when one has ended."""
    site = await make_site(tenant_max_in_flight=2)
    site.worker.pace.clear()
    running = [asyncio.create_task(ask(site)) for _ in range(2)]

    async def both_live() -> bool:
        return len(await site.bus.list_live()) == 2

    await wait_until_async(both_live, description="two live requests")
    status, answer, headers = await ask(site)
    assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
    assert await refusals(site) == {"tenant_in_flight": 1.0}
    site.worker.pace.set()
    assert [status for status, _, _ in await asyncio.gather(*running)] == [200, 200]
    assert (await ask(site))[0] == 200


async def test_a_tenant_may_have_limits_of_its_own(make_site: SiteMaker) -> None:
    """`--tenant-limits` should hold for the tenant that it names, the general flags for the others, each by its key."""
    name = hashlib.sha256(b"vip").hexdigest()[:16]
    site = await make_site(api_key=("vip", "plain"), tenant_requests_per_minute=1, tenant_limits=(f"{name}:rpm=3",))
    assert [(await ask(site, key="vip"))[0] for _ in range(4)] == [200, 200, 200, 429]
    assert [(await ask(site, key="plain"))[0] for _ in range(2)] == [200, 429]


async def test_joining_is_not_charged(make_site: SiteMaker) -> None:
    """A POST whose idempotency key is known should be answered with the first response, limit or no limit."""
    site = await make_site(tenant_requests_per_minute=1)
    answers = []
    for _ in range(3):
        headers = {"Idempotency-Key": "k"}
        async with site.http.post(site.base_url + COMPLETIONS, json=ASKED, headers=headers) as response:
            answers.append((response.status, (await response.json())["id"]))
    assert len(set(answers)) == 1
    assert answers[0][0] == 200
    assert (await ask(site))[0] == 429


async def test_a_request_without_a_worker_is_counted(make_site: SiteMaker) -> None:
    """Other reasons to turn a request away should be counted beside the limits, and wrong requests not at all."""
    site = await make_site(worker={"model": "another"})
    assert (await ask(site))[0] == 503
    assert (await ask(site, prompt=""))[0] == 400
    assert await refusals(site) == {"no_worker": 1.0}


def _queue_refusal(num_tokens: int) -> SubmitOutcome:
    depth = QueueDepth(num_sequences=1, num_tokens=num_tokens)
    reason = RefusalReason.QUEUED_REQUESTS
    return SubmitOutcome(SubmitAnswer.FULL, RequestId("cmpl-x"), detail="x", reason=reason, queued=depth)


def test_retry_after_follows_the_queue() -> None:
    """The time to wait should be that which the queue takes at the pace of late, within a second and a minute."""
    clock = ManualClock()
    pace = Pace(clock)
    door = Door(DoorConfig(), pace)

    def wait_s(num_tokens: int) -> int:
        error = door.to_error(_queue_refusal(num_tokens), "anyone")
        assert isinstance(error, Overloaded)
        return error.retry_after_s

    assert wait_s(1000) == 5
    for _ in range(10):
        clock.advance(1.0)
        pace.note(50)
    assert [wait_s(tokens) for tokens in (10, 100, 101, 1000, 10**6)] == [1, 2, 3, 20, 60]
    clock.advance(WINDOW_S - 5.0)
    assert wait_s(100) == 10  # 6 of the notes are in the window: 10 tokens a second
    clock.advance(WINDOW_S)
    assert wait_s(100) == 5


def test_limits_of_tenants_are_read() -> None:
    """Each part should set one limit, what is not named stay as for all, and `none` lift it."""
    default = TenantLimits(requests_per_minute=5, max_in_flight=2)
    name = "0123456789abcdef"
    read = parse_tenant_limits([f"{name}:rpm=60:tpm=9000", "anyone:in-flight=none"], default)
    assert read == {
        name: TenantLimits(requests_per_minute=60, tokens_per_minute=9000, max_in_flight=2),
        "anyone": TenantLimits(requests_per_minute=5),
    }


@pytest.mark.parametrize("text", ["", "vip:rpm=1", "0123456789ABCDEF:rpm=1", "anyone:rpm", "anyone:rpm=0",
                                  "anyone:rpm=-1", "anyone:rpm=1.5", "anyone:rps=1", "anyone:rpm=٣", "anyone:",
                                  "anyone:rpm=99999999999", "anyone:rpm=1:", "x" * 10_000])  # fmt: skip
def test_wrong_limits_of_tenants_are_refused(text: str) -> None:
    """What is not of the form should be a short error that names the flag and what it takes."""
    with pytest.raises(ConfigError, match="--tenant-limits") as caught:
        parse_tenant_limits([text], TenantLimits())
    assert len(str(caught.value)) < 700
    with pytest.raises(ConfigError, match="--tenant-limits"):
        load(GatewayConfig, [f"--tenant-limits={text}"], program="gateway")


def test_a_tenant_is_named_once() -> None:
    """Two lists of limits for one tenant should be refused, not the first or last one taken."""
    with pytest.raises(ConfigError, match="twice"):
        parse_tenant_limits(["anyone:rpm=1", "anyone:tpm=1"], TenantLimits())
