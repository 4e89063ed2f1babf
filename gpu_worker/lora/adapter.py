"""Adapters in host memory, and the slots that a step finds them in.

Design note. An adapter is known by the hash of its files (`shared/adapters.py`): two of one hash are the same.
Sequences hold on to the adapter they run with, so the store (`AdapterStore`) may forget one at any time, the least
recently used first: it only has to be read again for the next request.

Slots are given while a plan is filled in, which may be beside a step that still computes with what they hold; factors
move into them (`place`) when the plan is started. A slot's adapter stays until another needs the slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpu_worker.lora.peft_weights import Parts
from gpu_worker.lora.targets import Key
from shared.adapters import content_hash
from shared.errors import ConfigError, shorten
from shared.logs import get_log

_log = get_log("lora")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter in host memory. `prepared`: its factors as the slots want them."""

    content: str
    prepared: object = field(compare=False, repr=False)


class SlotBackend(Protocol):
    """Where a way of computing has its slots."""

    def prepare(self, factors: dict[Key, Parts]) -> object:
        """`factors` in the form that `put` takes; any thread."""
        ...

    def put(self, slot: int, prepared: object) -> None:
        """Have `slot` hold what was prepared; no step computes meanwhile."""
        ...


class AdapterSlots:
    """Which adapter is in which slot. The engine's thread uses it."""

    def __init__(self, num_slots: int, backend: SlotBackend) -> None:
        self._backend = backend
        self._given: list[Adapter | None] = [None] * num_slots
        self._placed: list[Adapter | None] = [None] * num_slots
        self._used_at = [0] * num_slots
        self._clock = 0
        self.num_placed = 0

    def give(self, adapters: Iterable[Adapter]) -> dict[Adapter, int]:
        """A slot for each; at most as many different ones as there are slots."""
        wanted = dict.fromkeys(adapters)
        assert len(wanted) <= len(self._given), "more adapters in a step than --max-loras"
        slots = {adapter: slot for slot, adapter in enumerate(self._given) if adapter in wanted}
        free = [slot for slot, adapter in enumerate(self._given) if adapter not in slots]
        free.sort(key=lambda slot: self._used_at[slot], reverse=True)
        for adapter in wanted:
            if adapter not in slots:
                slots[adapter] = free.pop()
                self._given[slots[adapter]] = adapter
        self._clock += 1
        for slot in slots.values():
            self._used_at[slot] = self._clock
        return slots

    def place(self) -> None:
        """Have each slot hold what was given it; no step computes meanwhile."""
        for slot, adapter in enumerate(self._given):
            if adapter is not None and adapter != self._placed[slot]:
                self._backend.put(slot, adapter.prepared)
                self._placed[slot] = adapter
                self.num_placed += 1

    @property
    def contents(self) -> tuple[str, ...]:
        """Of the adapters in the slots."""
        return tuple(adapter.content for adapter in self._placed if adapter is not None)


class AdapterStore:
    """Adapters by content, at most `max_held`; any thread uses it.

    Args:
        read: the factors of an adapter's folder. Raises `ConfigError`.
    """

    def __init__(self, max_held: int, read: Callable[[Path], dict[Key, Parts]], backend: SlotBackend) -> None:
        self._max_held, self._read, self._backend = max_held, read, backend
        self._held: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    def find(self, content: str) -> Adapter | None:
        """The adapter of this hash if it is held; it is then the last to go."""
        with self._lock:
            adapter = self._held.pop(content, None)
            if adapter is not None:
                self._held[content] = adapter
            return adapter

    def load(self, folder: Path, content: str = "") -> Adapter:
        """The adapter in `folder`, read unless it is held.

        Args:
            content: what its hash must be; empty: any.

        Raises:
            ConfigError: it can't be read, does not fit the model, or is another one by now.
        """
        if content and (held := self.find(content)) is not None:
            return held
        found = content_hash(folder)
        if content and found != content:
            raise ConfigError(f"{shorten(folder)}: the adapter's files have changed since it was loaded; load it again")
        if (held := self.find(found)) is not None:
            return held
        adapter = self.take(found, self._read(folder))
        _log.info("adapter.read", folder=shorten(folder), content=found)
        return adapter

    def take(self, content: str, factors: dict[Key, Parts]) -> Adapter:
        """An adapter of these factors, held from now on."""
        adapter = Adapter(content, self._backend.prepare(factors))
        with self._lock:
            self._held[content] = adapter
            while len(self._held) > self._max_held:
                del self._held[next(iter(self._held))]
        return adapter

    @property
    def contents(self) -> tuple[str, ...]:
        """Of all adapters held, the last used last."""
        with self._lock:
            return tuple(self._held)
