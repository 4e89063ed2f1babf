"""A whole gateway on a real port, over a bus, with a scripted worker: `site`."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from gateway.app import GatewayApp
from shared.bus import Bus
from shared.config import DoorConfig, GatewayConfig, HttpConfig, ModelConfig, ProcessConfig
from shared.memory_bus import MemoryBus
from shared.messages import RequestBody
from tests.gateway.scripted_worker import PlainLeader, ScriptedWorker
from tests.gateway.tiny_model import END, make_model_folder, make_tokenizer

TEXT = "hello world, this is the text of the test"


@dataclass(slots=True)
class Site:
    """One cell with one gateway. `says` is what the model answers to every request."""

    bus: Bus
    app: GatewayApp
    worker: ScriptedWorker
    leader: PlainLeader
    base_url: str
    http: aiohttp.ClientSession
    tokenizer: Tokenizer

    def says(self, text: str | list[int], *, adds_end: bool = True) -> None:
        """Let the model answer `text` (or token ids) and then its end token, or go round and round."""
        ids = self.tokenizer.encode(text).ids if isinstance(text, str) else text
        self.worker.script = lambda body, choice: ids if adds_end else ids * 1000

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.http.post(self.base_url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def post_raw(self, path: str, data: bytes) -> tuple[int, Any]:
        """Status and JSON of a POST of raw bytes."""
        async with self.http.post(self.base_url + path, data=io.BytesIO(data)) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.http.get(self.base_url + path, **options) as response:
            return response.status, await response.json()

    async def check_alive(self) -> None:
        """The fixed request is answered as ever, and nothing is left."""
        script, self.worker.script = self.worker.script, lambda body, choice: self.tokenizer.encode(TEXT).ids
        status, answer = await self.post("/v1/completions", {"prompt": "hi", "max_tokens": 100, "temperature": 0})
        assert (status, answer["choices"][0]["text"]) == (200, TEXT)
        assert await self.bus.list_live() == set()
        self.worker.script = script


SiteMaker = Callable[..., Awaitable[Site]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny model's tokenizer."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def make_site(tiny_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[SiteMaker]:
    """Makes sites on memory buses: `folder`, `worker` (hello fields), and HTTP or process settings by name."""
    async with AsyncExitStack() as stack:
        yield partial(_make_site, stack, tiny_folder, tokenizer)


@pytest.fixture
async def bus_site(bus: Bus, tiny_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Site]:
    """A site with default settings over each bus in turn."""
    async with AsyncExitStack() as stack:
        yield await _make_site(stack, tiny_folder, tokenizer, bus=bus)


@pytest.fixture
async def site(make_site: SiteMaker) -> Site:
    """A site with default settings over the memory bus."""
    return await make_site()


async def _make_site(
    stack: AsyncExitStack,
    tiny_folder: Path,
    tokenizer: Tokenizer,
    /,
    *,
    bus: Bus | None = None,
    folder: Path | None = None,
    worker: dict[str, Any] | None = None,
    leads: bool = True,
    **settings: Any,
) -> Site:
    bus = bus or MemoryBus()
    scripted = ScriptedWorker(bus, _default_script(tokenizer), tokenizer.token_to_id(END), **(worker or {}))
    await scripted.start()
    stack.push_async_callback(scripted.stop)
    leader = PlainLeader(bus, scripted.worker_id)
    if leads:
        await leader.start()
    stack.push_async_callback(leader.stop)
    app = GatewayApp(make_config(folder or tiny_folder, **settings), bus)
    port = await app.start()
    stack.push_async_callback(app.close)
    http = await stack.enter_async_context(aiohttp.ClientSession())
    return Site(bus, app, scripted, leader, f"http://127.0.0.1:{port}", http, tokenizer)


def make_config(folder: Path, **settings: Any) -> GatewayConfig:
    """A gateway's configuration; `settings` by name, wherever they belong."""
    groups = {"process": ProcessConfig(worker_lease_s=1.0, leader_lease_s=1.0), "http": HttpConfig(port=0),
              "model": ModelConfig(model=str(folder)), "door": DoorConfig()}  # fmt: skip
    for name, group in groups.items():
        own = {field.name for field in dataclasses.fields(group)} & settings.keys()
        groups[name] = dataclasses.replace(group, **{key: settings.pop(key) for key in own})
    assert not settings
    return GatewayConfig(**groups)  # type: ignore[arg-type]


def _default_script(tokenizer: Tokenizer) -> Callable[[RequestBody, int], list[int]]:
    ids = tokenizer.encode(TEXT).ids
    return lambda body, choice: ids
