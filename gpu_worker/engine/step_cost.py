"""What a step costs, learned from the steps there were: how much of a prompt fits into a step of a given length.

A step's work is counted in units: a token is one, and each key that a query sees is `key_cost` of one. The seconds of
a unit are a running mean over steps of at least `MIN_UNITS` (smaller ones are bound by reading the weights, and say
nothing of what one more token costs; their seconds have a mean of their own). So the mean always comes from steps of
about the size that it is used for, and what such a step costs beside its units (weights, launches) is in it.
"""

from __future__ import annotations

MIN_UNITS = 16.0
NEW_SHARE = 0.2
"""Of a step in the mean: half of it is from the last three steps."""
MAX_RISE = 2.0
"""A step counts as at most this many times the mean: one that was interrupted is no measure."""
UNLIMITED = 1e9
"""More than any step can hold."""
FIRST_UNITS = 64.0
"""What is planned while nothing has been measured."""


class StepCost:
    """Learns the seconds of a unit.

    Args:
        key_cost: units of one (query, key) pair.
    """

    def __init__(self, key_cost: float) -> None:
        self.key_cost = key_cost
        self._unit_s: float | None = None
        self._small_s: float | None = None

    def units(self, start: int, length: int) -> float:
        """Of computing tokens start .. start + length of a sequence."""
        return length * (1.0 + self.key_cost * (start + (length + 1) / 2))

    def observe(self, units: float, seconds: float) -> None:
        """A step of `units` took `seconds`."""
        if seconds <= 0.0:
            return
        if units < MIN_UNITS:
            self._small_s = _follow(self._small_s, seconds)
            return
        self._unit_s = _follow(self._unit_s, seconds / units)

    @property
    def unit_s(self) -> float:
        """Seconds of a unit; 0.0 while nothing has been measured."""
        return self._unit_s or 0.0

    def step_s(self, units: float) -> float:
        """Seconds of a step of `units`; 0.0 while nothing like it has been measured."""
        return (self._small_s or 0.0) if units < MIN_UNITS else units * self.unit_s

    def units_within(self, seconds: float) -> float:
        """How many units take about `seconds`."""
        return FIRST_UNITS if self._unit_s is None else seconds / self._unit_s

    def longest(self, start: int, units: float) -> int:
        """The most tokens from `start` on that cost at most `units`; may be 0."""
        units = min(max(units, 0.0), UNLIMITED)
        linear = 1.0 + self.key_cost * (start + 0.5)
        if self.key_cost == 0.0:
            return int(units)
        # key_cost / 2 · length² + linear · length = units
        root = (linear * linear + 2.0 * self.key_cost * units) ** 0.5
        return int((root - linear) / self.key_cost)


def _follow(mean: float | None, value: float) -> float:
    """The running mean after `value`."""
    return value if mean is None else mean + NEW_SHARE * (min(value, MAX_RISE * mean) - mean)
