"""Which models a gateway finds under which names, and which workers it gives their requests to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.directory import ModelDirectory
from gateway.health import HealthSettings, HealthView
from gateway.model_folder import load_model_folder
from gateway.served_model import ModelText
from shared.clock import ManualClock
from shared.errors import NotFound
from shared.ids import WorkerId
from shared.memory_bus import MemoryBus
from shared.messages import WorkerHello


class Cell:
    """Workers that say hello and live on, and the directory of a gateway of model `tiny`, also served as `small`."""

    def __init__(self, folder: Path) -> None:
        self.bus = MemoryBus()
        self.health = HealthView(self.bus, ManualClock(), HealthSettings(worker_lease_s=3.0, leader_lease_s=1.5))
        self.directory = ModelDirectory(self.health, ModelText(load_model_folder(folder), 512), ("tiny", "small"))

    async def enter(self, name: str, **hello: object) -> None:
        """A worker comes."""
        settings = {"model": "tiny", "fingerprint": "f1", "dtype": "float32", "device": "cpu", "max_model_len": 512,
                    "block_size": 16, "num_blocks": 64, "max_num_seqs": 8, "pid": 1, "host": "here"}  # fmt: skip
        await self.bus.hello(WorkerHello(worker_id=WorkerId(f"{name}:1"), **(settings | hello)))  # type: ignore[arg-type]
        await self.health.poll()

    async def beat(self) -> None:
        """Everybody who is there beats."""
        for pulse in await self.bus.read_workers():
            await self.bus.beat(pulse.hello.worker_id, 1, [])

    async def leave(self, name: str) -> None:
        """It goes."""
        await self.bus.bye(WorkerId(f"{name}:1"))
        await self.health.poll()

    def worker_of(self, name: str | None) -> str | None:
        """The worker that a request to model `name` is checked against."""
        worker = self.directory.find_worker(self.directory.find(name))
        return None if worker is None else worker.worker_id.partition(":")[0]


@pytest.fixture
def cell(tiny_folder: Path) -> Cell:
    return Cell(tiny_folder)


async def test_a_model_is_found_under_each_of_its_names(cell: Cell) -> None:
    """Every served name, and no name at all, should lead to the model; an unknown one be refused naming those known."""
    for name in (None, "tiny", "small"):
        assert cell.worker_of(name) is None
    await cell.enter("a", names=("other", "tiny"), model="other")
    for name in (None, "tiny", "small"):
        assert cell.worker_of(name) == "a"
    with pytest.raises(NotFound, match="'huge' is not served here; served: tiny, small"):
        cell.directory.find("huge")


async def test_a_replacement_takes_the_name_when_it_is_no_smaller(cell: Cell) -> None:
    """Of workers that compute differently those with the most KV memory together should get what is new; within a
    group the one that can hold the longest request is asked."""
    await cell.enter("old1")
    await cell.enter("old2", max_model_len=600)
    await cell.beat()
    await cell.enter("new1", max_model_len=700, fingerprint="f2")
    assert cell.worker_of("tiny") == "old2"
    await cell.beat()
    await cell.enter("new2", fingerprint="f2")
    assert cell.worker_of("tiny") == "new1"
    await cell.leave("new1")
    await cell.leave("new2")
    assert cell.worker_of("tiny") == "old2"
