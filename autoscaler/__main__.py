"""`python -m autoscaler`: carries out what the leader would like, on the containers of one compose project."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from autoscaler.docker_containers import DockerContainers
from autoscaler.metrics import AutoscalerMetrics
from autoscaler.service import AutoscalerService
from shared import logs, process
from shared.config import AutoscalerConfig, load
from shared.errors import ConfigError
from shared.metrics import serve_metrics
from shared.redis_bus import open_bus
from shared.worker_wish import WorkerLimits

_DESCRIPTION = "Starts and stops workers' containers as the leader would like. Needs Docker's socket."


def main() -> int:
    """Run until SIGTERM or SIGINT; the exit code: 0, or 2 for a wrong setting."""
    try:
        config = load(AutoscalerConfig, sys.argv[1:], program="python -m autoscaler", description=_DESCRIPTION)
        if not config.process.redis_url:
            raise ConfigError("--redis-url: name the Redis of the cell")
        if not config.project:
            raise ConfigError("--project: name the compose project whose workers these are")
        limits = config.scaling.limits()
        if limits is None:
            raise ConfigError("--autoscale: say MIN:MAX, the same as for the scheduler (QUIRE_AUTOSCALE in .env)")
        if config.process.die_with_parent:
            process.die_with_parent()
        logs.set_up("autoscaler", config.process.log_level)
        uvloop.run(_serve(config, limits))
    except ConfigError as error:
        print(f"autoscaler: error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: AutoscalerConfig, limits: WorkerLimits) -> None:
    stop = asyncio.Event()
    process.install_stop_signals(stop)
    metrics = AutoscalerMetrics()
    port = config.process.metrics_port
    server = None if port is None else serve_metrics(metrics.registry, host=config.process.metrics_host, port=port)
    bus = open_bus(config.process.redis_url)
    containers = DockerContainers(config.docker_url, config.project, config.service)
    process.settle_memory()
    try:
        await AutoscalerService(bus, containers, limits, metrics).run(stop)
    finally:
        await bus.close()
        if server is not None:
            server.close()


if __name__ == "__main__":
    sys.exit(main())
