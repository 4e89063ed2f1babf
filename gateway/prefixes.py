"""Names of a request's prompt prefixes, for the scheduler to see where they are cached and who shares them."""

from __future__ import annotations

from shared.bus import Bus
from shared.messages import RequestBody
from shared.prefix import PrefixNames, pack, scope_of

MAX_NAMED_BLOCKS = 512
"""Blocks of a request that are named, over all of its prompts: a longer match would hardly change a decision, and each
costs the event loop 1.8 µs (16 tokens, least of 50 runs on a busy Zen 3)."""


class PrefixNamer:
    """Names prefixes as the workers of the cell do; knows nothing until `ask` has had an answer."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._key: bytes | None = None
        self._names: dict[int, PrefixNames] = {}

    async def ask(self) -> None:
        """Learn the cell's key; it is another one after Redis was emptied. Raises `BusError`."""
        key = await self._bus.prefix_key()
        if key != self._key:
            self._key = key
            self._names.clear()

    def name(self, body: RequestBody, tenant: str, block_size: int) -> tuple[bytes, ...]:
        """For each prompt the packed names of its full blocks, as far as they are named; () when nothing is known.

        Args:
            block_size: of the workers that may run it.
        """
        if self._key is None:
            return ()
        maker = self._names.setdefault(block_size, PrefixNames(self._key, block_size))
        root, left, packed = maker.root(scope_of(tenant, body.cache_salt, body.adapter)), MAX_NAMED_BLOCKS, []
        for prompt in body.prompts:
            names: list[bytes] = []
            maker.extend(names, root, prompt[: left * block_size])
            left -= len(names)
            packed.append(pack(names))
        return tuple(packed)
