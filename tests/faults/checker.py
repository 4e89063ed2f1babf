"""The invariants of every fault test, (a) to (e):

(a) each accepted request has exactly one terminal event; (b) its text equals the undisturbed run (or is a prefix of
it, for a client that left or was cut off); (c) event ids of a stream rise strictly; (d) at rest all blocks are free,
nothing runs or waits, nothing is pending in a stream, `live` is empty and every ended request's key has a TTL; (e)
accepted == finished + failed + cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import redis.asyncio

from shared import keys
from tests.faults.streams import StreamRecord
from tests.waiting import wait_until_async

_ENDED_PREFIXES = ("req:", "log:", "idem:")


def check_stream(record: StreamRecord, undisturbed: StreamRecord) -> None:
    """(a), (b) and (c) for one stream."""
    assert record.status == 200, record.error
    assert record.event_ids == sorted(set(record.event_ids)), "event ids must rise strictly"
    for choice, reasons in record.finishes.items():
        assert len(reasons) == 1, f"choice {choice} finished {len(reasons)} times"
    if record.ending == "done":
        assert record.outcome() == undisturbed.outcome()
    else:
        for choice, text in record.texts.items():
            assert undisturbed.texts[choice].startswith(text), f"choice {choice} is no prefix of the undisturbed text"


async def check_at_rest(
    redis_url: str, base_url: str, *, timeout_s: float = 10.0, api_key: str = "", counters: bool = True
) -> None:
    """(d) and (e), within `timeout_s`: the last reason why not is what fails.

    `counters=False` leaves (e) out: a dead gateway took its own counts with it.
    """
    deadline = time.monotonic() + timeout_s
    client = redis.asyncio.from_url(redis_url)
    try:
        while True:
            try:
                metrics = await read_metrics(base_url, api_key)
                why_not = await _redis_unrest(client) + _metrics_unrest(metrics, counters=counters)
            except redis.exceptions.ConnectionError as error:
                why_not = [f"Redis is away: {error}"]
            except aiohttp.ClientConnectionError as error:
                why_not = [f"the gateway is away: {error}"]
            if not why_not:
                return
            assert time.monotonic() < deadline, f"not at rest: {why_not}"
            await asyncio.sleep(0.1)
    finally:
        await client.aclose()


async def _redis_unrest(client: Any) -> list[str]:
    reasons = []
    if live := await client.smembers(keys.LIVE):
        reasons.append(f"live holds {sorted(live)[:3]}")
    workers = {
        field.decode().removeprefix("hello:")
        for field in await client.hkeys(keys.WORKERS)
        if field.startswith(b"hello:")
    }
    async for raw in client.scan_iter(count=1000):
        key = raw.decode()
        if key.startswith("inbox:"):
            owner = key.removeprefix("inbox:")
            if owner not in workers or await client.xlen(key):
                reasons.append(f"{key} is left over or holds commands")
        elif key.startswith(_ENDED_PREFIXES):
            if await client.ttl(key) < 0:
                reasons.append(f"{key} has no TTL")
        elif key.startswith(keys.card("")):
            if await client.zscore(keys.CARDS, key.removeprefix(keys.card(""))) is None:
                reasons.append(f"{key} is not in {keys.CARDS}")
        elif key not in keys.STANDING_KEYS:
            reasons.append(f"{key} is not a key of ours")
    if await client.exists(keys.SUBMIT) and await client.xlen(keys.SUBMIT):
        reasons.append("submit holds wake-ups")
    if await client.exists(keys.DEAD):
        reasons.append(f"{await client.xlen(keys.DEAD)} dead letters")
    return reasons


def _metrics_unrest(metrics: Mapping[str, float], *, counters: bool) -> list[str]:
    reasons = [
        f"{name} is {metrics.get(name)}"
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:num_requests_swapped",
            "vllm:kv_cache_usage_perc",
            "vllm:cpu_cache_usage_perc",
        )
        if metrics.get(name) != 0
    ]
    ended = sum(metrics[f"quire:requests_{kind}_total"] for kind in ("finished", "failed", "cancelled"))
    if counters and metrics["quire:requests_accepted_total"] != ended:
        reasons.append(f"accepted {metrics['quire:requests_accepted_total']} but ended {ended}")
    return reasons


async def wait_for_preemptions(base_url: str, least: int) -> None:
    """Return when the cell's metrics tell of that many preemptions: a calm worker reports every half second."""

    async def were_preempted() -> bool:
        return (await read_metrics(base_url))["vllm:num_preemptions_total"] >= least

    await wait_until_async(were_preempted, description=f"{least} preemptions", timeout_s=3)


async def read_metrics(base_url: str, api_key: str = "") -> dict[str, float]:
    """The cell's metrics: sample name → value, summed over labels."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession() as session, session.get(base_url + "/metrics", headers=headers) as response:
        text = await response.text()
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values
