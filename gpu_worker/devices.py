"""Which GPU this worker takes when a machine has several: a claim in Redis, so that replicas don't share the first."""

from __future__ import annotations

import dataclasses

from gpu_worker.service import Place
from shared.bus import Bus
from shared.errors import ConfigError
from shared.logs import get_log

_log = get_log("devices")


async def claim_gpu(bus: Bus, device: str, place: Place) -> Place:
    """`place` with a GPU that no other worker has, made the current one of this thread; `place` itself when there is
    nothing to choose (no CUDA wanted or found, or one GPU only).

    Args:
        device: the setting: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: all GPUs are taken.
    """
    if device == "cpu":
        return place
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return place
    uuids = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(count)}
    claimed = await bus.claim_device(place.first_id, list(uuids))
    if claimed is None:
        raise ConfigError(f"all {count} GPUs of this machine are taken by other workers")
    index = uuids[claimed]
    torch.cuda.set_device(index)
    _log.info("gpu.claimed", index=index, uuid=claimed)
    return dataclasses.replace(place, device_id=claimed, prepare_thread=lambda: torch.cuda.set_device(index))
