"""Seeded traffic: when requests arrive, how long they are, whose they are and of which class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random

from quire.simulate.settings import TrafficConfig, WorkersConfig
from scheduler_svc.simulation_trace import SimulatedPrefix, SimulatedRequest
from shared.errors import ConfigError, shorten

Shares = dict[str, float]
DAILY_SWING = 0.8
MAX_PREFIX_NUMBER = 100_000
"""Prefixes, and tokens of each."""


def make_traffic(traffic: TrafficConfig, workers: WorkersConfig) -> list[SimulatedRequest]:
    """All arrivals in order of time. Raises `ConfigError` for a bad tenant, class or number of prefixes."""
    random = Random(traffic.seed)
    tenants = parse_shares("--tenants", traffic.tenants)
    classes = {_priority(name): share for name, share in parse_shares("--classes", traffic.classes).items()}
    names, priorities = list(tenants), list(classes)
    draw_prefix = _prefix_drawer(traffic)
    return [
        SimulatedRequest(
            arrival_s=arrival_s,
            prefix=(prefix := draw_prefix()),
            prompt_len=(prefix.num_tokens if prefix else 0) + _length(random, traffic.prompt_len, traffic.spread),
            max_tokens=traffic.max_tokens,
            output_len=min(traffic.max_tokens, _length(random, traffic.output_len, traffic.spread)),
            timeout_s=traffic.request_timeout_s,
            priority=random.choices(priorities, list(classes.values()))[0],
            tenant=random.choices(names, list(tenants.values()))[0],
        )
        for arrival_s in _arrivals(traffic, rate_of(traffic, workers), random)
    ]


def rate_of(traffic: TrafficConfig, workers: WorkersConfig) -> float:
    """Requests a second: what was given, or the share of what the workers can do with all of their slots full."""
    if traffic.rate is not None:
        return traffic.rate
    each = traffic.prompt_len + traffic.output_len / 2
    batch = min(workers.max_num_seqs, max(1.0, workers.num_blocks * workers.block_size / each))
    decode_s = traffic.output_len * (workers.step_ms / batch + workers.token_ms) / 1000
    prompt_s = traffic.prompt_len * workers.token_ms / 1000
    return traffic.load * workers.workers / (decode_s + prompt_s)


def parse_shares(flag: str, given: tuple[str, ...]) -> Shares:
    """NAME or NAME:SHARE as shares by name. Raises `ConfigError`."""
    shares: Shares = {}
    for text in given:
        name, separator, number = text.partition(":")
        share = _positive(number) if separator else 1.0
        if not name or share is None:
            raise ConfigError(f"{flag}={shorten(text)}: must be NAME or NAME:SHARE with a share above 0, as a:2")
        if name in shares:
            raise ConfigError(f"{flag}={shorten(text)}: {shorten(name)} is there twice")
        shares[name] = share
    return shares


def parse_shared_prefixes(text: str) -> tuple[int, int]:
    """How many prefixes N:TOKENS says, and how long they are. Raises `ConfigError`."""
    parts = text.split(":")
    numbers = [int(p) for p in parts if p.isascii() and p.isdecimal() and len(p) <= len(str(MAX_PREFIX_NUMBER))]
    if len(parts) != 2 or len(numbers) != 2 or not 1 <= min(numbers) <= max(numbers) <= MAX_PREFIX_NUMBER:
        raise ConfigError(f"--shared-prefixes={shorten(text)}: must be N:TOKENS, each 1 to {MAX_PREFIX_NUMBER}, as "
                          "20:512")  # fmt: skip
    return numbers[0], numbers[1]


def _prefix_drawer(traffic: TrafficConfig) -> Callable[[], SimulatedPrefix | None]:
    """What draws the prefix of a request; one that draws nothing else, so that all else stays as it is without."""
    if not traffic.shared_prefixes:
        return lambda: None
    number, num_tokens = parse_shared_prefixes(traffic.shared_prefixes)
    prefixes = [SimulatedPrefix(i, num_tokens) for i in range(number)]
    weights = list(accumulate((i + 1) ** -traffic.prefix_skew for i in range(number)))
    random = Random(f"prefixes {traffic.seed}")
    return lambda: random.choices(prefixes, cum_weights=weights)[0]


def _positive(text: str) -> float | None:
    """The finite number above 0 that `text` is, else None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _priority(name: str) -> int:
    try:
        return int(name)
    except ValueError:
        raise ConfigError(f"--classes={shorten(name)}: a priority is a whole number; write PRIORITY or "
                          "PRIORITY:SHARE") from None  # fmt: skip


def _arrivals(traffic: TrafficConfig, rate: float, random: Random) -> Iterator[float]:
    """Times in seconds; gaps are exponential, so that `rate` requests a second come in the long run."""
    if traffic.arrivals == "daily":
        yield from _daily(traffic, rate, random)
        return
    together = traffic.burst if traffic.arrivals == "bursts" else 1
    now = 0.0
    for number in range(traffic.requests):
        if number % together == 0:
            now += random.expovariate(rate / together)
        yield now


def _daily(traffic: TrafficConfig, rate: float, random: Random) -> Iterator[float]:
    """As many over a day, fewest at its beginning, most in its middle (thinned from the most there ever are)."""
    now, peak = 0.0, 1 + DAILY_SWING
    for _ in range(traffic.requests):
        is_kept = False
        while not is_kept:
            now += random.expovariate(rate * peak)
            level = 1 - DAILY_SWING * math.cos(2 * math.pi * now / traffic.day_s)
            is_kept = random.random() * peak < level
        yield now


def _length(random: Random, mean: int, spread: float) -> int:
    """At least 1; log-normal with that mean."""
    if spread == 0:
        return mean
    return max(1, round(random.lognormvariate(math.log(mean) - spread**2 / 2, spread)))
