"""What a step costs, learned from the steps there were: how much of a prompt fits into a step of a given length.

A step's work is counted in units: a token is one, and each key that a query sees is `key_cost` of one. A step of u
units takes fixed + u · unit seconds: reading the weights (launches, on a GPU) costs the same for one token as for many.
Both numbers are those of the line through the last steps that has the least squared error, older ones counting less
and less. While steps are all of one size they tell nothing of the slope, and the last known one stays; before any was
known a step is taken to cost as much as its units, which plans too little rather than too much.

A line from small steps knows nothing of large ones: while reading the weights takes longer than the arithmetic, it is
flat. But r times the units never take more than r times as long, so what is planned is also held to the best rate of
the last steps, in units a second; from there the size grows within a few steps to what fits.
"""

from __future__ import annotations

import math

KEPT_SHARE = 0.95
"""Of a step's weight when the next one comes: half of the line is from the last 14 steps."""
KEPT_RATE = 0.98
"""Of the best rate from step to step."""
MIN_SPREAD = 0.05
"""Steps whose sizes differ less (standard deviation over mean) are of one size."""
MAX_RISE = 2.0
"""A step counts as at most this many times the most that was to be expected: one that was interrupted is no measure."""
MIN_FALL = 0.5
"""A step that took less than this share of what was expected shows that what was learned is wrong (the first steps of a
process fault their memory in): nothing makes a step faster than it can be. All is learned anew then."""
FIRST_UNITS = 64.0
"""What is planned while nothing has been measured."""
UNLIMITED = 1e9
"""More than any step can hold."""


class StepCost:
    """Learns the seconds of a step.

    Args:
        key_cost: units of one (query, key) pair.
        window: most keys that a query sees; 0: all before it. A chunk is taken to begin no later than that, so that its
            cost is at most overrated by its own length.

    Attributes:
        fixed_s, unit_s: a step of u units takes about fixed_s + u · unit_s seconds; both 0 before the first step.
    """

    def __init__(self, key_cost: float, window: int = 0) -> None:
        self.key_cost = key_cost
        self._max_start = window or math.inf
        self.fixed_s = 0.0
        self.unit_s = 0.0
        self._has_slope = False
        self._rate = 0.0
        # Of the steps, each with its weight: the sum of weights, means of units and seconds, the sum of squared
        # deviations of units, and that of units times seconds.
        self._weight = self._units = self._seconds = self._spread = self._product = 0.0

    def units(self, start: int, length: int) -> float:
        """Of computing tokens start .. start + length of a sequence."""
        return length * (1.0 + self.key_cost * (min(start, self._max_start) + (length + 1) / 2))

    def step_s(self, units: float) -> float:
        """About how long a step of `units` takes, in seconds; 0 before the first one."""
        return self.fixed_s + units * self.unit_s

    def observe(self, units: float, seconds: float) -> None:
        """A step of `units` took `seconds`."""
        if units <= 0.0 or seconds <= 0.0:
            return
        if seconds < MIN_FALL * self.step_s(units):
            self._forget()
        if self._weight > 0.0:
            most_expected = self._seconds * max(1.0, units / self._units)
            seconds = min(seconds, MAX_RISE * most_expected)
        self._rate = max(units / seconds, KEPT_RATE * self._rate)
        self._add(units, seconds)
        proportional = self._seconds / self._units
        if self._spread > self._weight * (MIN_SPREAD * self._units) ** 2:
            self.unit_s = self._product / self._spread
            self._has_slope = True
        elif not self._has_slope:
            self.unit_s = proportional
        self.unit_s = min(max(self.unit_s, 0.0), proportional)
        self.fixed_s = self._seconds - self.unit_s * self._units

    def _forget(self) -> None:
        self._has_slope = False
        self._weight = self._units = self._seconds = self._spread = self._product = 0.0

    def _add(self, units: float, seconds: float) -> None:
        """West's weighted update of means and sums of deviations (CACM 22, 1979)."""
        self._weight = KEPT_SHARE * self._weight + 1.0
        from_units, from_seconds = units - self._units, seconds - self._seconds
        self._units += from_units / self._weight
        self._seconds += from_seconds / self._weight
        self._spread = KEPT_SHARE * self._spread + from_units * (units - self._units)
        self._product = KEPT_SHARE * self._product + from_units * (seconds - self._seconds)

    def units_within(self, seconds: float) -> float:
        """How many units take about `seconds`."""
        if self._weight == 0.0:
            return FIRST_UNITS
        most = self._rate * seconds
        return min(most, (seconds - self.fixed_s) / self.unit_s) if self.unit_s > 0.0 else most

    def longest(self, start: int, units: float) -> int:
        """The most tokens from `start` on that cost at most `units`; may be 0."""
        units = min(max(units, 0.0), UNLIMITED)
        linear = 1.0 + self.key_cost * (min(start, self._max_start) + 0.5)
        if self.key_cost == 0.0:
            return int(units)
        # key_cost / 2 · length² + linear · length = units
        root = (linear * linear + 2.0 * self.key_cost * units) ** 0.5
        return int((root - linear) / self.key_cost)
