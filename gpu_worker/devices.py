"""Which GPUs this worker takes when a machine has several: claims in Redis, so that replicas don't share the first."""

from __future__ import annotations

import contextlib
import dataclasses

from gpu_worker.service import Place
from shared.bus import Bus
from shared.errors import BusError, ConfigError
from shared.logs import get_log

_log = get_log("devices")


async def claim_gpus(bus: Bus, device: str, place: Place, num_ranks: int = 1) -> Place:
    """`place` with a GPU for each rank that no other worker has, the first one made the current one of this thread;
    `place` itself when there is nothing to choose (no CUDA wanted or found, or one GPU only).

    Args:
        device: the setting: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: too few GPUs are free.
    """
    if device == "cpu":
        return place
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count < num_ranks:
        raise ConfigError(f"--tensor-parallel-size={num_ranks}: this machine has {count} GPU(s); lower it")
    if count < 2:
        return place
    uuids = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(count)}
    claimed = await _claim(bus, place, list(uuids), num_ranks)
    cards = tuple(uuids[uuid] for uuid in claimed)
    torch.cuda.set_device(cards[0])
    for uuid, index in zip(claimed, cards, strict=True):
        _log.info("gpu.claimed", index=index, uuid=uuid)
    return dataclasses.replace(
        place, device_ids=claimed, cards=cards, prepare_thread=lambda: torch.cuda.set_device(cards[0])
    )


async def _claim(bus: Bus, place: Place, uuids: list[str], count: int) -> tuple[str, ...]:
    """`count` of `uuids`, or none and a `ConfigError`."""
    claimed: list[str] = []
    while len(claimed) < count:
        uuid = await bus.claim_device(place.first_id, [uuid for uuid in uuids if uuid not in claimed])
        if uuid is None:
            if claimed:
                with contextlib.suppress(BusError):
                    await bus.bye(place.first_id)
            raise ConfigError(f"{len(claimed)} of this machine's {len(uuids)} GPUs are not taken by other workers, and "
                              f"this one needs {count}")  # fmt: skip
        claimed.append(uuid)
    return tuple(claimed)
