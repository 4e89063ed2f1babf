"""How long workers computed for somebody, by phase, and what that costs.

Whole microseconds, so that sums over steps, attempts, requests and tenants are exact. *Prefill* is computing prompts,
and computing again what had been computed before a preemption or a worker's death; *decode* is all else: the newest
token of a sequence, and drafts behind it.
"""

from __future__ import annotations

from typing import NamedTuple

US_PER_S = 1_000_000
S_PER_HOUR = 3600


class WorkTime(NamedTuple):
    """Worker time in microseconds."""

    prefill_us: int = 0
    decode_us: int = 0

    @property
    def prefill_s(self) -> float:
        return self.prefill_us / US_PER_S

    @property
    def decode_s(self) -> float:
        return self.decode_us / US_PER_S

    @property
    def seconds(self) -> float:
        """Of both phases."""
        return (self.prefill_us + self.decode_us) / US_PER_S

    def plus(self, other: WorkTime) -> WorkTime:
        """The sum by phase."""
        return WorkTime(self.prefill_us + other.prefill_us, self.decode_us + other.decode_us)


NO_WORK = WorkTime()


def cost_of(seconds: float, price_per_hour: float) -> float:
    """Money for `seconds` of a worker at `price_per_hour`."""
    return seconds * price_per_hour / S_PER_HOUR
