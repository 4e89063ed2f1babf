"""`quire bench gateway`: what the services cost beside the model, as CPU time and as time to the first token.

Design note. It starts a whole cell of its own on this machine: Redis, scheduler, gateways, and a worker whose model
costs nothing (`mock_worker.py`). CPU time is that of the processes, user and system, so it depends little on what else
the machine does; wall times do. Four loads: streams at once (CPU time / tokens, taking the requests in and ending them
included), requests one after another (time from the POST to the first event: gateway, scheduler, worker and back),
one-token requests side by side (CPU time / requests), and nothing at all.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from quire.bench import machine, service_load
from quire.bench.mock_cell import CellPlan, MockCell
from quire.bench.report import shown
from quire.bench.stream_client import as_background
from shared import config
from shared.errors import ConfigError, shorten
from shared.flags import setting

DESCRIPTION = (
    "What gateway, scheduler, Redis and the worker's event loop cost beside the model: CPU time a token, a request and "
    "a second without work, and the time to the first token. Starts a cell of its own with a model that costs nothing."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayBenchConfig:
    streams: tuple[int, ...] = setting((1, 32), "streams at once, one run for each number", minimum=1)
    tokens: int = setting(256, "output tokens of each stream", minimum=2)
    step_ms: float = setting(20.0, "time between two tokens of a stream", minimum=0)
    rounds: int = setting(4, "how often the streams of a run are sent, one set after another", minimum=1)
    requests: int = setting(500, "one-token requests for TTFT and again for the cost of a request", minimum=1)
    concurrency: int = setting(32, "one-token requests in flight when their cost is measured", minimum=1)
    idle_s: float = setting(5.0, "how long to watch the cell without work", minimum=0.1)
    gateways: int = setting(1, "gateways, which get the streams in turn", minimum=1, maximum=16)
    kept: bool = setting(False, "let Redis wait for the disk at each write, as `quire serve` does with --data-dir")
    model: str = setting("", "folder whose tokenizer to use; default: that of `quire bench model tiny`")
    json: str = setting("", "write all figures to this file")


def main(argv: list[str]) -> int:
    """Run the command; 1 if an answer was not what it should be."""
    settings = config.load(GatewayBenchConfig, argv, program="quire bench gateway", description=DESCRIPTION)
    if settings.json and not Path(settings.json).absolute().parent.is_dir():
        raise ConfigError(f"--json={shorten(settings.json)}: its folder is not there")
    report = measure(settings)
    print(format_report(report))
    if settings.json:
        document = {"settings": shown(settings), "machine": machine.describe(), "results": report}
        Path(settings.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"all figures are in {settings.json}")
    return 1 if report["errors"] else 0


def measure(settings: GatewayBenchConfig) -> dict[str, Any]:
    """All figures, and `errors`: what was wrong with answers."""
    from quire.bench.random_model import write_random_model  # needs torch, which takes seconds to import

    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        folder = Path(name)
        model = Path(settings.model) if settings.model else write_random_model("tiny", folder / "model")
        plan = CellPlan(
            folder=folder,
            model=model,
            num_gateways=settings.gateways,
            step_ms=settings.step_ms,
            is_kept=settings.kept,
        )
        with MockCell(plan) as cell, as_background():
            return uvloop.run(_measure(cell, settings, model))


async def _measure(cell: MockCell, settings: GatewayBenchConfig, model: Path) -> dict[str, Any]:
    load = service_load.ServiceLoad(cell, model)
    await load.warm_up()
    streams = [await load.streams(num, settings.tokens, settings.rounds) for num in settings.streams]
    return {
        "streams": streams,
        "first": await load.first_tokens(settings.requests),
        "requests": await load.requests(settings.requests, settings.concurrency),
        "idle": await load.idle(settings.idle_s),
        "errors": load.errors,
    }


def format_report(report: dict[str, Any]) -> str:
    """The figures as a table."""
    idle, requests, first = report["idle"], report["requests"], report["first"]
    return "\n".join([
        f"{'CPU time':24}" + "".join(f"{name:>15}" for name in [*idle["ms_per_s"], "all"]),
        *(_row(f"{run['streams']} streams, µs a token", run["us_per_token"]) for run in report["streams"]),
        _row("one request, µs", requests["us_per_request"]),
        _row("idle, ms a second", idle["ms_per_s"]),
        *map(_describe_streams, report["streams"]),
        f"TTFT on an idle cell: p50 {first['ttft_ms_p50']:.2f} ms, p99 {first['ttft_ms_p99']:.2f} ms "
        f"({first['requests']} requests)",
        f"one core of scheduler could dispatch {requests['dispatches_per_core_s']:.0f} requests/s; "
        f"{requests['requests_per_s']:.0f} requests/s were sent",
        *(f"FAILED: {error}" for error in report["errors"][:5]),
    ])  # fmt: skip


def _describe_streams(run: dict[str, Any]) -> str:
    shares = " · ".join(f"{share:.0%}" for share in run["gateway_shares"])
    return (
        f"{run['streams']} streams: {run['tokens']} tokens, {run['tokens_per_s']:.0f} tokens/s, "
        f"{run['tokens_per_read']:.1f} tokens a read of the client, shares of the gateways {shares}"
    )


def _row(title: str, figures: dict[str, float]) -> str:
    return f"{title:24}" + "".join(f"{value:15.1f}" for value in [*figures.values(), sum(figures.values())])
