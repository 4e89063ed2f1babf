"""What a request cost: in its usage when its client asks, and by tenant in /metrics, never by key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from shared.bus import CommitItem, CommitOutcome, WorkItem
from shared.memory_bus import MemoryBus
from shared.work_time import WorkTime
from tests.faults.streams import follow
from tests.gateway.conftest import TEXT, Site, SiteMaker

PRICE = 7200.0
"""2 a second."""


class WorkingBus(MemoryBus):
    """Says with each commit that its requests took 30 ms of prefill and 5 ms for each token so far."""

    async def commit(self, worker_id, items: Sequence[CommitItem], work=()) -> list[CommitOutcome]:  # type: ignore[no-untyped-def]
        work = [WorkItem(i.request_id, i.attempt, 30_000, 5_000 * (i.start + 1)) for i in items]
        return await super().commit(worker_id, items, work)


@pytest.fixture
async def priced(make_site: SiteMaker) -> Site:
    return await make_site(bus=WorkingBus(), price_per_hour=PRICE)


def make_body(**fields: object) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": 4, "include_cost": True, "ignore_eos": True, **fields}


def usage_of(worked: WorkTime) -> dict[str, object]:
    return {
        "cost": 2 * worked.seconds,
        "worker_seconds": worked.seconds,
        "worker_seconds_details": {"prefill": worked.prefill_s, "decode": worked.decode_s},
    }


async def read_series(site: Site, name: str, **options: object) -> dict[str, float]:
    async with site.http.get(f"{site.base_url}/metrics", **options) as response:  # type: ignore[arg-type]
        lines = [line for line in (await response.text()).splitlines() if line.startswith(name + "{")]
    return {line[len(name) : line.rindex(" ")]: float(line.rpartition(" ")[2]) for line in lines}


async def test_usage_says_what_was_asked(priced: Site) -> None:
    """An answer should hold cost and worker time of its request if it asked, and neither if not."""
    status, answer = await priced.post("/v1/completions", make_body())
    assert status == 200
    assert usage_of(WorkTime(30_000, 20_000)).items() <= answer["usage"].items()
    _, answer = await priced.post("/v1/completions", make_body(include_cost=False))
    assert not {"cost", "worker_seconds"} & answer["usage"].keys()


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_a_stream_says_it_in_its_usage_chunk(priced: Site, options: dict[str, object]) -> None:
    """Asking for the cost should be asking for the usage chunk; the same again when the stream is resumed."""
    url = f"{priced.base_url}/v1/completions"
    record = await follow(priced.http, url, make_body(stream=True, **options))
    assert (record.ending, len(record.event_ids)) == ("done", len(set(record.event_ids)))
    assert record.usage is not None
    assert usage_of(WorkTime(30_000, 20_000)).items() <= record.usage.items()
    again = await follow(priced.http, f"{priced.base_url}/v1/streams/{record.request_id}", None)
    assert again.usage == record.usage


async def test_a_stop_string_costs_what_led_to_it(priced: Site) -> None:
    """Where a stop string ends the answer, its cost should be known as of the token that completed it."""
    priced.says(TEXT, adds_end=False)
    priced.worker.max_drawn = 2
    body = make_body(stop=["w"], max_tokens=100)
    _, answer = await priced.post("/v1/completions", body)
    used = answer["usage"]["completion_tokens"]
    assert answer["usage"]["worker_seconds_details"] == {"prefill": 0.03, "decode": 0.005 * used}


async def test_without_a_price_it_is_refused(site: Site) -> None:
    """A server that has no price should say how to give it one, and go on answering those that don't ask."""
    status, answer = await site.post("/v1/completions", make_body())
    assert (status, answer["error"]["param"]) == (400, "include_cost")
    assert "--price-per-hour" in answer["error"]["message"]
    status, answer = await site.post("/v1/completions", make_body(include_cost=None))
    assert status == 200
    status, answer = await site.post("/v1/completions", make_body(include_cost="yes"))
    assert (status, answer["error"]["param"]) == (400, "include_cost")


async def test_metrics_count_by_tenant_and_phase(make_site: SiteMaker) -> None:
    """/metrics should name the tenants of this gateway's keys, sum all others, and show no key; cost follows time."""
    bus = WorkingBus()
    site = await make_site(bus=bus, price_per_hour=PRICE, api_key=("key-a", "key-b"))
    a, b = (hashlib.sha256(key).hexdigest()[:16] for key in (b"key-a", b"key-b"))
    headers = {"Authorization": "Bearer key-a"}
    for _ in range(2):
        await site.post("/v1/completions", make_body(), headers=headers)
    bus.steps.worked["gone"] = WorkTime(1_000_000, 0)
    seconds = await read_series(site, "quire:worker_seconds_total", headers=headers)
    assert seconds == {
        f'{{phase="{phase}",tenant="{tenant}"}}': value
        for tenant, phases in {a: (0.06, 0.04), b: (0.0, 0.0), "other": (1.0, 0.0)}.items()
        for phase, value in zip(("prefill", "decode"), phases, strict=True)
    }
    assert await read_series(site, "quire:cost_total", headers=headers) == {k: 2 * v for k, v in seconds.items()}
    async with site.http.get(f"{site.base_url}/metrics", headers=headers) as response:
        assert "key-a" not in await response.text()


async def test_without_a_price_seconds_are_counted(make_site: SiteMaker) -> None:
    """Worker time should be there whatever it costs, cost only with a price."""
    site = await make_site(bus=WorkingBus())
    await site.post("/v1/completions", make_body(include_cost=False))
    assert sum((await read_series(site, "quire:worker_seconds_total")).values()) == pytest.approx(0.05)
    assert await read_series(site, "quire:cost_total") == {}
