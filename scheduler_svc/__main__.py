"""`python -m scheduler_svc`: one scheduler against a given Redis."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.service import SchedulerService
from shared import failpoints, logs, process
from shared.clock import MonotonicClock
from shared.config import SchedulerConfig, load
from shared.errors import ConfigError
from shared.metrics import serve_metrics
from shared.redis_bus import open_bus

_DESCRIPTION = "Decides who is admitted, where, and who gives way. A second one stands by."


def main() -> int:
    """Run until SIGTERM or SIGINT; the exit code: 0, or 2 for a wrong setting."""
    try:
        config = load(SchedulerConfig, sys.argv[1:], program="python -m scheduler_svc", description=_DESCRIPTION)
        if not config.process.redis_url:
            raise ConfigError("--redis-url: name a Redis (only `quire serve` starts one by itself)")
        failpoints.arm(config.process.failpoints)
        if config.process.die_with_parent:
            process.die_with_parent()
        logs.set_up("scheduler_svc", config.process.log_level)
        uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"scheduler_svc: error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: SchedulerConfig) -> None:
    stop = asyncio.Event()
    process.install_stop_signals(stop)
    metrics = SchedulerMetrics()
    port = config.process.metrics_port
    server = None if port is None else serve_metrics(metrics.registry, host=config.process.metrics_host, port=port)
    bus = open_bus(config.process.redis_url)
    process.settle_memory()
    try:
        await SchedulerService(bus, config, MonotonicClock(), metrics).run(stop)
    finally:
        await bus.close()
        if server is not None:
            server.close()


if __name__ == "__main__":
    sys.exit(main())
