"""Which GPUs a worker takes, on a machine that torch believes to have some."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpu_worker.devices import claim_gpus
from gpu_worker.service import Place, new_place
from shared.errors import ConfigError
from shared.ids import WorkerId
from shared.memory_bus import MemoryBus


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine of four GPUs; the ones that became current."""
    made_current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}"))
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    return made_current


def _place(number: int) -> Place:
    return Place(first_id=WorkerId(f"w{number}:1"))


async def test_each_rank_gets_a_gpu_of_its_own(memory_bus: MemoryBus, current: list[int]) -> None:
    """Workers of two ranks and of one should have GPUs that no other has, the first rank's current in its thread."""
    first = await claim_gpus(memory_bus, "cuda", _place(0), 2)
    second = await claim_gpus(memory_bus, "auto", _place(1))
    assert (first.device_ids, first.cards) == (("gpu-0", "gpu-1"), (0, 1))
    assert (second.device_ids, second.cards) == (("gpu-2",), (2,))
    assert first.prepare_thread is not None
    first.prepare_thread()
    assert current == [0, 2, 0]


async def test_what_is_too_few_is_given_back(memory_bus: MemoryBus, current: list[int]) -> None:
    """A worker that finds fewer free GPUs than it has ranks should say so and keep none of them."""
    await claim_gpus(memory_bus, "cuda", _place(0), 3)
    with pytest.raises(ConfigError, match="1 of this machine's 4 GPUs are not taken by other workers, and this one "
                                          "needs 2"):  # fmt: skip
        await claim_gpus(memory_bus, "cuda", _place(1), 2)
    assert (await claim_gpus(memory_bus, "cuda", _place(2))).cards == (3,)
    with pytest.raises(ConfigError, match="0 of this machine's 4 GPUs are not taken"):
        await claim_gpus(memory_bus, "cuda", _place(3))
    assert current == [0, 3]


async def test_more_ranks_than_gpus_are_refused(memory_bus: MemoryBus, current: list[int]) -> None:
    """The machine should have a GPU for each rank, but for those of a CPU worker."""
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size=5: this machine has 4 GPU\(s\); lower it"):
        await claim_gpus(memory_bus, "cuda", _place(0), 5)
    place = new_place()
    assert await claim_gpus(memory_bus, "cpu", place, 5) is place
    assert current == []
