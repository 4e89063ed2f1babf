"""`python -m gateway`: one gateway against a given Redis."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from gateway.app import GatewayApp
from shared import failpoints, logs
from shared.bus import BusLimits
from shared.config import GatewayConfig, load, refuse_long_paths
from shared.errors import ConfigError, shorten
from shared.process import die_with_parent, install_stop_signals, settle_memory


def main() -> int:
    """Run until a signal; the exit code: 0 after a clean drain, 2 for a wrong setting."""
    try:
        config = load(
            GatewayConfig, sys.argv[1:], program="python -m gateway", description="The HTTP gateway of Quire."
        )
        if config.process.die_with_parent:
            die_with_parent()
        if not config.process.redis_url:
            raise ConfigError("--redis-url: name a Redis (only `quire serve` starts one by itself)")
        logs.set_up("gateway", config.process.log_level)
        failpoints.arm(config.process.failpoints)
        with refuse_long_paths():
            uvloop.run(_serve(config))
    except ConfigError as error:
        print(f"gateway: error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: GatewayConfig) -> None:
    from shared.redis_bus import open_bus

    stop = asyncio.Event()
    install_stop_signals(stop)
    limits = BusLimits(
        record_ttl_s=config.http.record_ttl_s,
        max_queued_requests=config.door.max_num_queued_reqs,
        max_queued_tokens=config.door.max_num_queued_tokens,
    )
    bus = open_bus(config.process.redis_url, limits)
    try:
        app = GatewayApp(config, bus)
        try:
            await app.start()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--host={shorten(config.http.host)} --port={config.http.port}: {reason}") from None
        settle_memory()
        await stop.wait()
        await app.drain()
    finally:
        await bus.close()


if __name__ == "__main__":
    sys.exit(main())
