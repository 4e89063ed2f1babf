"""`quire bench serve`: send a workload to a server some times, print medians, write everything as JSON."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp

from quire.bench import machine, statistics, workloads
from quire.bench.client import BenchClient, first_model
from quire.bench.report import shown, to_text
from quire.bench.statistics import Trace
from quire.bench.workloads import BenchRequest, Workload
from shared import config
from shared.errors import ConfigError, QuireError, shorten
from shared.flags import setting

DIGITS = {"requests": 0} | dict.fromkeys(
    ("wall_s", "requests_per_s", "tpot_ms_p50", "tpot_ms_p99", "itl_ms_p50", "itl_ms_p99"), 2
)
"""Of figures, behind the point; 1 of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    base_url: str = setting("http://127.0.0.1:8000", "address of the server, without /v1")
    workload: tuple[str, ...] = setting(("w1",), "what to send: w1, w2, w3, w4 or JSONL files")
    concurrency: int | None = setting(None, "most requests in flight; default: all at once", minimum=1)
    repeats: int = setting(3, "how often; medians are shown", minimum=1)
    highest_token_id: int = setting(workloads.HIGHEST_TOKEN_ID, "token ids of w1 to w4 are from 300 to this "
                                    f"(for `tiny`: {workloads.HIGHEST_TOKEN_ID_TINY})", minimum=301)  # fmt: skip
    model: str = setting("", "model to ask for; default: the first one that the server lists")
    api_key: str = setting("", "bearer token to send")
    json: str = setting("", "write all figures to this file")
    timeout_s: float = setting(3600.0, "end a request after this long", minimum=1)


def main(argv: list[str]) -> int:
    """Run the command; 1 if any request failed or brought a wrong number of tokens."""
    settings = config.load(BenchConfig, argv, program="quire bench serve", description=__doc__ or "")
    _check(settings)
    reports = asyncio.run(measure(settings))
    print("\n".join(format_report(report) for report in reports))
    if settings.json:
        document = {"settings": shown(settings), "machine": machine.describe(), "results": reports}
        Path(settings.json).write_text(to_text(document), encoding="utf-8")
        print(f"all figures are in {settings.json}")
    return 1 if any(report["errors"] for report in reports) else 0


def _check(settings: BenchConfig) -> None:
    """Raise `ConfigError` for what would otherwise fail late: after the measuring, or with a library's words."""
    check_url("--base-url", settings.base_url)
    if settings.json and not Path(settings.json).absolute().parent.is_dir():
        raise ConfigError(f"--json={shorten(settings.json)}: its folder is not there")


def check_url(flag: str, given: str) -> None:
    """Raise `ConfigError`, naming `flag`, unless `given` is the address of a server."""
    url = read_url(given)
    if url is None or url.path.rstrip("/") or url.query:
        text = shorten(given if given.isprintable() else ascii(given))
        raise ConfigError(f"{flag}={text}: must be like http://127.0.0.1:8000, without /v1")


def read_url(given: str) -> SplitResult | None:
    """The parts of an address over HTTP; None: it is none."""
    try:
        url = urlsplit(given)
        is_good = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        return None
    return url if is_good and given.isascii() and given.isprintable() and " " not in given else None


async def measure(settings: BenchConfig) -> list[dict[str, Any]]:
    """One report a workload: its name, median and single figures, and what went wrong.

    Raises:
        ConfigError: a workload is wrong.
        QuireError: the server does not answer.
    """
    for name in settings.workload:
        workloads.build(name)
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        settings.base_url, headers=headers, timeout=timeout, connector=connector, read_bufsize=2**20
    ) as session:
        try:
            client = BenchClient(session, settings.model or await first_model(session))
        except aiohttp.ClientResponseError as error:
            remedy = "; give --api-key" if error.status == HTTPStatus.UNAUTHORIZED else ""
            raise _no_models(settings, f"{error.status} {shorten(error.message)}{remedy}") from None
        except (aiohttp.ClientError, ValueError, KeyError, IndexError) as error:
            raise _no_models(settings, shorten(error)) from None
        await _warm_up(client, settings)
        return [await _measure_workload(client, settings, name) for name in settings.workload]


def _no_models(settings: BenchConfig, problem: str) -> QuireError:
    return QuireError(f"{shorten(settings.base_url)} does not list its models: {problem}")


async def _warm_up(client: BenchClient, settings: BenchConfig) -> None:
    (request,) = workloads.build("w1", repeat=999, highest_token_id=settings.highest_token_id).requests
    trace = await client.stream(replace(request, max_tokens=8))
    if trace.error:
        raise QuireError(f"the first request failed: {shorten(trace.error)}")


async def _measure_workload(client: BenchClient, settings: BenchConfig, name: str) -> dict[str, Any]:
    repeats, errors = [], []
    for repeat in range(1, settings.repeats + 1):
        workload = workloads.build(name, repeat=repeat, highest_token_id=settings.highest_token_id)
        started_at = time.monotonic()
        traces, intruder = await _send(client, workload, settings.concurrency)
        wall_s = time.monotonic() - started_at
        everyone = traces if intruder is None else [*traces, intruder]
        figures = statistics.summarize(everyone, wall_s)
        if intruder is not None:
            figures |= statistics.summarize_intruder(traces, intruder)
        repeats.append(figures)
        errors += [trace.error for trace in everyone if trace.error]
        print(f"{workload.name} {repeat}/{settings.repeats}: {wall_s:.1f} s", file=sys.stderr)
    return {"workload": workload.name, "median": statistics.medians(repeats), "repeats": repeats, "errors": errors}


async def _send(client: BenchClient, workload: Workload, concurrency: int | None) -> tuple[list[Trace], Trace | None]:
    """All of `workload`; the trace of its intruder apart."""
    slots = asyncio.Semaphore(concurrency or len(workload.requests))
    is_time = asyncio.Event()
    num_underway = 0

    def note(trace: Trace) -> None:
        nonlocal num_underway
        num_underway += len(trace.arrivals) == workloads.INTRUDER_AFTER_TOKENS
        if num_underway == len(workload.requests):
            is_time.set()

    async def send_one(request: BenchRequest) -> Trace:
        async with slots:
            return await client.stream(request, note)

    async def intrude(request: BenchRequest) -> Trace:
        await is_time.wait()
        return await client.stream(request)

    streams = asyncio.gather(*map(send_one, workload.requests))
    if workload.intruder is None:
        return list(await streams), None
    long = asyncio.ensure_future(intrude(workload.intruder))
    traces = list(await streams)
    is_time.set()  # streams that ended early must not leave the intruder waiting
    return traces, await long


def format_report(report: dict[str, Any]) -> str:
    """One workload's medians as lines of text; a dash where there was nothing to measure."""
    median, count = report["median"], len(report["repeats"])
    m = {name: "–" if math.isnan(value) else f"{value:.{DIGITS.get(name, 1)}f}" for name, value in median.items()}
    lines = [
        f"{report['workload']}: {m['requests']} requests in {m['wall_s']} s (medians of {count})",
        f"  output      {m['output_tokens_per_s']:>9} tokens/s {m['requests_per_s']:>9} requests/s",
        f"  TTFT    p50 {m['ttft_ms_p50']:>9} ms   p99 {m['ttft_ms_p99']:>9} ms",
        f"  TPOT    p50 {m['tpot_ms_p50']:>9} ms   p99 {m['tpot_ms_p99']:>9} ms",
        f"  ITL     p50 {m['itl_ms_p50']:>9} ms   p99 {m['itl_ms_p99']:>9} ms   max {m['itl_ms_max']} ms",
    ]
    if "long_ttft_ms" in m:
        lines.append(f"  long prompt: TTFT {m['long_ttft_ms']} ms, longest stall {m['longest_stall_ms']} ms")
    lines += [f"  FAILED: {error}" for error in sorted(set(report["errors"]))[:5]]
    return "\n".join(lines)
