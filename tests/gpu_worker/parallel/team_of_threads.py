"""A worker's ranks as threads of one process: everything between them is real, but for the processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpu_worker.model.assembly import Parts, load_parts, make_runner
from gpu_worker.model.runner import DecoderRunner
from gpu_worker.model.split import Split
from gpu_worker.parallel.follower import follow
from gpu_worker.parallel.leader import lead
from gpu_worker.parallel.orders import Orders
from gpu_worker.parallel.team import Team
from shared.config import EngineConfig, ModelConfig, WorkerConfig

_Result = TypeVar("_Result")


class Thread(threading.Thread):
    """Runs `call`; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._error: BaseException | None = None
        self._value: Any = None

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def result(self, timeout_s: float = 120.0) -> Any:
        self.join(timeout_s)
        assert not self.is_alive(), "a rank hangs"
        if self._error is not None:
            raise self._error
        return self._value


def each_rank(size: int, call: Callable[[Team], _Result]) -> list[_Result]:
    """What `call` gives on each of `size` ranks."""
    meeting = os.memfd_create("ranks")
    try:
        threads = [Thread(lambda rank=rank: call(Team(rank, size, meeting, is_cuda=False))) for rank in range(size)]
        for thread in threads:
            thread.start()
        return [thread.result() for thread in threads]
    finally:
        os.close(meeting)


@contextmanager
def ranks_of(folder: Path, size: int, **settings: Any) -> Iterator[tuple[DecoderRunner, list[Parts]]]:
    """The runner of the first of `size` ranks, with the others at work, and the parts of all."""
    model = {name: settings.pop(name) for name in ("dtype", "quantization", "max_model_len") if name in settings}
    engine = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 16 << 20} | settings
    config = WorkerConfig(
        model=ModelConfig(model=str(folder), **({"dtype": "float32"} | model)),
        engine=EngineConfig(tensor_parallel_size=size, **engine),
    )

    def load(team: Team) -> tuple[Team, Parts]:
        return team, load_parts(config, Split(team.rank, size, team))

    loaded = each_rank(size, load)
    (team, first), *others = loaded
    followers = [Thread(lambda other=other: follow(*other)) for other in others]
    for thread in followers:
        thread.start()
    orders = Orders(team)
    yield make_runner(lead(first, orders), config.engine), [parts for _, parts in loaded]
    orders.end()
    for thread in followers:
        thread.result()
