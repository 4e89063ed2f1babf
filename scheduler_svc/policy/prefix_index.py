"""Which workers hold which prefixes, as far as their reports have told.

One entry a name, with a bit for each worker that holds it, so that asking costs O(blocks of the prompt), however many
workers there are. It is a hint: what a worker has forgotten meanwhile is computed again, and nothing else happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.ids import WorkerId


class PrefixIndex:
    """Short names (`shared/prefix.py`) by worker."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._bits: dict[WorkerId, int] = {}
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """Names that somebody holds."""
        return len(self._holders)

    def note(self, worker_id: WorkerId, here: Iterable[bytes], gone: Iterable[bytes]) -> None:
        """`worker_id` holds the names in `here`, and those in `gone` no more."""
        holders, bit = self._holders, self._bit(worker_id)
        for name in here:
            holders[name] = holders.get(name, 0) | bit
        for name in gone:
            left = holders.get(name, 0) & ~bit
            if left:
                holders[name] = left
            else:
                holders.pop(name, None)

    def forget(self, worker_id: WorkerId) -> None:
        """Nothing is known of `worker_id` any more. O(all names)."""
        bit = self._bits.pop(worker_id, 0)
        if not bit:
            return
        self._holders = {name: left for name, mask in self._holders.items() if (left := mask & ~bit)}
        self._free_bits.append(bit)

    def longest(self, names: Sequence[bytes]) -> dict[WorkerId, int]:
        """How many of `names`, from the first on, each worker holds that holds the first one."""
        held: dict[int, int] = {}
        mask = self._holders.get(names[0], 0) if names else 0
        everybody = mask
        for depth in range(1, len(names) + 1):
            following = mask & self._holders.get(names[depth], 0) if depth < len(names) else 0
            if mask != following:
                held[mask & ~following] = depth
            mask = following
            if not mask:
                break
        return {
            worker: depth
            for worker, bit in self._bits.items()
            if bit & everybody
            for m, depth in held.items()
            if m & bit
        }

    def _bit(self, worker_id: WorkerId) -> int:
        bit = self._bits.get(worker_id)
        if bit is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
            self._bits[worker_id] = bit
        return bit
