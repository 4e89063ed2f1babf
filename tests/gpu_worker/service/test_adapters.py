"""Requests with adapters on their way through a worker's service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.bus import RequestState
from shared.errors import ConfigError
from tests.gpu_worker.service.cell import Cell
from tests.scripted_runner import ScriptedRunner


@dataclass(frozen=True)
class LoadedName:
    """An adapter that is nothing but its hash."""

    content: str


class Source:
    """Has every adapter but "bad"."""

    def __init__(self) -> None:
        self.asked: list[tuple[Path, str]] = []

    def load(self, folder: Path, content: str = "") -> LoadedName:
        self.asked.append((folder, content))
        if content == "bad":
            raise ConfigError("its files have changed")
        return LoadedName(content)


async def test_a_request_runs_with_the_adapter_it_names(cell: Cell) -> None:
    """Its sequences should have the adapter in every step; one that cannot be read should be refused alone, and the
    client not be told of files."""
    runner, source = ScriptedRunner(), Source()
    runner.adapter_source = source
    worker = await cell.start_worker(runner, has_adapters=True)
    plain, fine, bad = await cell.submit(), await cell.submit(adapter="fine"), await cell.submit(adapter="bad")
    for request_id in (plain, fine, bad):
        await cell.dispatch(request_id, worker)
    await cell.assert_as_solo(plain, fine)
    ended = (await cell.wait_for_state(bad, RequestState.ENDED)).ended
    assert ended is not None
    assert (ended.reason, ended.error_kind) == ("rejected", "invalid_adapter")
    assert "files" not in ended.error_message
    assert source.asked == [(Path("/adapters/fine"), "fine"), (Path("/adapters/bad"), "bad")]
    of_requests = {c.sequence.request_id: c.sequence.adapter for plan in runner.plans for c in plan.chunks}
    assert of_requests == {plain: None, fine: LoadedName("fine")}


async def test_a_worker_without_adapters_refuses_them(cell: Cell) -> None:
    """A request that names one should end as rejected, not run without it."""
    worker = await cell.start_worker()
    request_id = await cell.run(worker, adapter="fine")
    ended = (await cell.wait_for_state(request_id, RequestState.ENDED)).ended
    assert ended is not None
    assert (ended.reason, ended.error_kind) == ("rejected", "invalid_adapter")
