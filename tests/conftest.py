"""Buses for tests: a private Redis, the memory bus, and a check that no test leaves keys behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.embedded_redis import EmbeddedRedis
from shared import failpoints, keys
from shared.bus import Bus, BusLimits
from shared.memory_bus import MemoryBus

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels run on CPU tensors


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_live: the test may leave live requests in Redis on purpose")


@pytest.fixture(scope="session")
def kernels_folder(pytestconfig: pytest.Config) -> Path:
    """Where compiled C kernels stay, by the hash of their sources: a compilation takes longer than all their tests."""
    return pytestconfig.rootpath / ".pytest_cache" / "kernels"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A private server in a short folder (unix socket paths are short), one for the whole run."""
    pytest.importorskip("redis", reason="the redis package is not installed here")
    folder = Path(tempfile.mkdtemp(prefix="qr-", dir="/tmp"))
    server = EmbeddedRedis(folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
async def redis_bus(redis_server: EmbeddedRedis, request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    """A bus on an empty Redis; fails the test that leaves keys which `shared/keys.py` does not allow."""
    from shared.redis_bus import open_bus
    from shared.redis_link import RedisLink

    link = RedisLink(redis_server.url)
    await link.call("FLUSHALL")
    bus = open_bus(redis_server.url, BusLimits())
    yield bus
    leaks = await find_leaks(link, may_leave_live=request.node.get_closest_marker("leaves_live") is not None)
    await bus.close()
    await link.close()
    assert leaks == []


@pytest.fixture
async def memory_bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture(params=["memory", "redis"])
def bus(request: pytest.FixtureRequest) -> Bus:
    """Each bus in turn."""
    chosen: Bus = request.getfixturevalue(f"{request.param}_bus")
    return chosen


@pytest.fixture(autouse=True)
def _disarm_failpoints() -> Iterator[None]:
    yield
    failpoints.arm("")


async def find_leaks(link: Any, *, may_leave_live: bool = False) -> list[str]:
    """What no key may be: undeclared, of a request that lives on, of an ended one without a TTL, of a gone worker."""
    live = {name.decode() for name in await link.call("SMEMBERS", keys.LIVE)}
    leaks = [] if may_leave_live else [f"live request {name}" for name in sorted(live)]
    for name in sorted(key.decode() for key in await link.call("KEYS", "*")):
        kind, _, rest = name.partition(":")
        if kind in ("req", "log", "idem") and rest:
            if await link.call("PTTL", name) < 0 and rest not in live:
                leaks.append(f"{name} has no TTL")
        elif kind == "inbox" and rest:
            if not await link.call("HEXISTS", keys.WORKERS, f"hello:{rest}"):
                leaks.append(f"{name} of a worker that is gone")
        elif kind == "card" and rest:
            if await link.call("ZSCORE", keys.CARDS, rest) is None:
                leaks.append(f"{name} is not in {keys.CARDS}")
        elif name not in keys.STANDING_KEYS:
            leaks.append(f"{name} is not declared")
    counts = [] if live else [keys.LIVE_TOKENS, keys.QUEUE, keys.IN_FLIGHT]
    return leaks + [f"{name} counts what is of no request" for name in counts if await link.call("EXISTS", name)]
