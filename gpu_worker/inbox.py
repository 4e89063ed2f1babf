"""Commands of the scheduler: run, preempt, abort.

An entry is deleted after its effect (with the next report), and every command may come twice: what is held already is
a no-op, and what the record does not confirm (ended, another owner, another attempt) is skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from pathlib import Path

from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine_thread import Applied, Withdraw
from gpu_worker.incarnation import Incarnation
from gpu_worker.ledger import End, Held, HeldChoice, Release
from gpu_worker.lora.modules import AdapterSource, LoadedAdapter
from shared.bus import InboxMessage, RequestRecord
from shared.errors import BusError, ConfigError, WireError, shorten
from shared.failpoints import failpoint
from shared.ids import EntryId
from shared.log import FinishEntry, TokenEntry, decode_entries, encode_entry
from shared.logs import get_log
from shared.messages import AbortRequest, PreemptRequest, RequestBody, RunRequest
from shared.prefix import scope_of

READ_COUNT = 64
BLOCK_MS = 1000
RETRY_S = 0.1

_log = get_log("inbox")


class Inbox:
    """Reads and applies commands in order.

    Args:
        evictions_at: evictions that report `seq` knew of, None when a later report knew of more.
        adapters: where those come from that requests name; None: there are none.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        evictions_at: Callable[[int], int | None],
        adapters: AdapterSource | None = None,
    ) -> None:
        self._adapters = adapters
        self._incarnation = incarnation
        self._evictions_at = evictions_at
        self._after = EntryId("0-0")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._read()
            except BusError as error:
                _log.recurring("inbox.failed", error=error)
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        """Wait for entries and apply them; a lost connection leaves them for the next time."""
        mine = self._incarnation
        entries = await mine.bus.read_inbox(mine.worker_id, self._after, READ_COUNT, BLOCK_MS)
        for entry_id, message in entries:
            await self._apply(message)
            self._after = entry_id
            mine.applied.append(entry_id)
            mine.thread.submit(Applied(entry_id))

    async def _apply(self, message: InboxMessage) -> None:
        match message:
            case RunRequest():
                await self._run(message)
            case PreemptRequest():
                self._preempt(message)
            case AbortRequest(request_id=request_id):
                held = self._incarnation.ledger.get(request_id)
                if held is not None:
                    self._incarnation.drop(held, "aborted")

    async def _run(self, message: RunRequest) -> None:
        mine = self._incarnation
        if mine.ledger.get(message.request_id, message.attempt) is not None:
            return
        held = await self._open(message)
        if held is None:
            _log.info("run.ignored", request_id=message.request_id, attempt=message.attempt)
            return
        failpoint("worker.after_inbox", message.request_id)
        older = mine.ledger.get(message.request_id)
        if older is not None:
            mine.drop(older, "taken again")
        mine.hold(held)

    async def _open(self, message: RunRequest) -> Held | None:
        """The request as record, body and log have it; None when it is not (or no longer) this worker's."""
        mine = self._incarnation
        record, body, data = await asyncio.gather(
            mine.load_own(message.request_id, message.attempt),
            mine.bus.load_body(message.request_id),
            mine.bus.read_log(message.request_id),
        )
        if record is None or body is None:
            return None
        if mine.is_draining:
            return _leaving(message, Release(is_preempted=False))
        try:
            adapter = await self._load_adapter(body)
        except ConfigError as error:
            _log.error("adapter.refused", request_id=message.request_id, name=shorten(body.model), error=error)
            text = f"model: the adapter {shorten(body.model)!r} cannot be loaded; the worker's log says why"
            return _leaving(message, End("rejected", "invalid_adapter", text))
        try:
            return open_request(message, record, body, data, adapter)
        except (WireError, LookupError) as error:  # one request that nobody can read must not end the others
            _log.error("request.unreadable", request_id=message.request_id, error=error, exc_info=True)
            return _leaving(message, End("failed", "internal_error", "the stored request cannot be read"))

    async def _load_adapter(self, body: RequestBody) -> LoadedAdapter | None:
        """The adapter that a request runs with, read if it is not held. Raises `ConfigError`."""
        if not body.adapter:
            return None
        if self._adapters is None:
            raise ConfigError("this worker has no adapters; start it with --enable-lora")
        return await asyncio.to_thread(self._adapters.load, Path(body.adapter_path), body.adapter)

    def _preempt(self, message: PreemptRequest) -> None:
        mine = self._incarnation
        held = mine.ledger.get(message.request_id, message.attempt)
        if held is None or held.exit is not None:
            return
        if held.sequences:  # a suspect that the engine does not know yet
            if not message.keeps:
                held.exit = Release(is_preempted=True)
                mine.outbox_due.set()
            return
        num_evictions = self._evictions_at(message.report_seq)
        if num_evictions is None:
            _log.info("preempt.ignored", request_id=message.request_id, report_seq=message.report_seq)
            return
        mine.thread.submit(Withdraw(message.request_id, message.attempt, num_evictions, message.keeps))


def open_request(
    message: RunRequest, record: RequestRecord, body: RequestBody, data: bytes, adapter: Hashable | None = None
) -> Held:
    """The unfinished choices of a request as sequences that go on behind what is logged.

    Args:
        data: the whole token log, of all choices. adapter: what its sequences run with.

    Raises:
        WireError: `data` is no log, or body or log contradict the record.
    """
    if len(body.prompts) * body.n != len(record.choices):
        raise WireError(f"{len(body.prompts)} prompts times {body.n} are not {len(record.choices)} choices")
    open_choices = [c for c in message.choices if record.choices[c].is_open]
    entries: dict[int, list[TokenEntry]] = {c: [] for c in open_choices}
    for entry in decode_entries(data):
        if entry.choice in entries:
            if isinstance(entry, FinishEntry):
                raise WireError(f"choice {entry.choice} is open and has a finish entry")
            entries[entry.choice].append(entry)
    if not entries:
        raise WireError("every choice is closed, and the request is not")
    if any(len(logged) != record.choices[c].num_entries for c, logged in entries.items()):
        raise WireError("the log holds other lengths than the record")
    held = Held(message.request_id, message.attempt, message.rank, is_suspect=message.crashes > 0)
    held.wants_cost = body.include_cost
    for choice, logged in entries.items():
        if len(logged) != record.choices[choice].num_entries:
            raise WireError(
                f"choice {choice} has {len(logged)} log entries, by its record {record.choices[choice].num_entries}"
            )
        prompt_len = len(body.prompts[choice // body.n])
        held.choices[choice] = HeldChoice(choice, prompt_len, [encode_entry(e) for e in logged], len(logged))
    scope = scope_of(record.summary.tenant, body.cache_salt, body.adapter)
    held.sequences = tuple(_to_sequence(message, body, choice, logged, scope) for choice, logged in entries.items())
    for sequence in held.sequences:
        sequence.adapter = adapter
    return held


def _to_sequence(
    message: RunRequest, body: RequestBody, choice: int, logged: list[TokenEntry], scope: tuple[str, ...]
) -> Sequence:
    prompt = body.prompts[choice // body.n]
    return Sequence(
        request_id=message.request_id,
        attempt=message.attempt,
        choice=choice,
        rank=message.rank,
        token_ids=[*prompt, *(entry.token_id for entry in logged)],
        num_prompt_tokens=len(prompt),
        sampling=body.sampling,
        is_pooled=body.kind == "embedding",
        is_alone=message.crashes > 0,
        priority=message.priority,
        cache_scope=scope,
    )


def _leaving(message: RunRequest, way: Release | End) -> Held:
    """A request that is taken only to be given away in the proper order."""
    return Held(message.request_id, message.attempt, message.rank, exit=way)
