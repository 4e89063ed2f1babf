"""What a benchmark sends: four workloads with fixed seeds, or a JSONL file.

Lengths are the same in every repeat; token ids differ by repeat, so that no prefix cache helps across repeats, but for
a prefix that is to be known. They are drawn from 300 up to a limit that all vocabularies of a model size hold.

| name | work |
|---|---|
| w1 | 1 request, 128 tokens in, 128 out |
| w2 | 32 at once, 32 to 256 in (4,522 in all), 16 to 256 out (4,622 in all) |
| w3 | 16 at once, 512 shared and 32 own tokens in, 32 out |
| w4 | 8 short streams (32 in, 160 out); once each has 24 tokens, one of 2,048 in, 32 out |
| mixed | 64: 32 in; 56 of them 8 to 32 out, 8 of them 256 (mean 50, a fifth of the longest) |
| lengths | 60: 54 of 64 tokens in all, half of them out, 6 of 1,500 with 64 out |
| full | 24: 480 in, 128 out |
| short | 32: 16 to 64 in, 32 out |
| long | 6: 1,024 in, 64 out |
| prefix-200, prefix-1500 | 16 at once, 50 own tokens in behind 200 or 1,500 that are the same in every repeat, 50 out |

A line of a JSONL file is `{"prompt": text or token ids, "max_tokens": n}` or `{"messages": [...], "max_tokens": n}`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, shorten

LOWEST_TOKEN_ID = 300
HIGHEST_TOKEN_ID = 30_000
HIGHEST_TOKEN_ID_TINY = 8_000
INTRUDER_AFTER_TOKENS = 24
"""w4: the long request comes once every short stream has this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request: token ids or text for /v1/completions, or messages for /v1/chat/completions.

    `has_fixed_length`: `ignore_eos` is sent and exactly `max_tokens` are expected back.
    """

    max_tokens: int
    prompt: tuple[int, ...] | str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    has_fixed_length: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`requests` are sent at once (as far as concurrency allows), `intruder` when each has `INTRUDER_AFTER_TOKENS`."""

    name: str
    requests: tuple[BenchRequest, ...]
    intruder: BenchRequest | None = None


def build(name: str, *, repeat: int = 0, highest_token_id: int = HIGHEST_TOKEN_ID) -> Workload:
    """Workload `name` (w1 to w4, or a JSONL file) as repeat number `repeat` sends it.

    Raises:
        ConfigError: no such workload or file, or a line of it is wrong.
    """
    maker = _MAKERS.get(name)
    if maker is not None:
        return maker(repeat, highest_token_id)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--workload={shorten(name)}: neither one of {', '.join(_MAKERS)} nor a file")
    lines = path.read_text(encoding="utf-8").splitlines()
    requests = tuple(_parse_line(path, i, line) for i, line in enumerate(lines, 1) if line.strip())
    if not requests:
        raise ConfigError(f"--workload={shorten(name)}: the file has no requests")
    return Workload(name=path.name, requests=requests)


W3_PREFIX = 512


def _w1(repeat: int, highest: int) -> Workload:
    rng = random.Random(101 + repeat)
    return Workload(name="w1", requests=(_request(_token_ids(rng, 128, highest), 128),))


def _w2(repeat: int, highest: int) -> Workload:
    lengths = random.Random(202)
    sizes = [(lengths.randint(32, 256), lengths.randint(16, 256)) for _ in range(32)]
    rng = random.Random(303 + repeat)
    requests = tuple(_request(_token_ids(rng, num_in, highest), num_out) for num_in, num_out in sizes)
    return Workload(name="w2", requests=requests)


def _w3(repeat: int, highest: int) -> Workload:
    rng = random.Random(404 + repeat)
    prefix = _token_ids(rng, W3_PREFIX, highest)
    requests = tuple(_request(prefix + _token_ids(rng, 32, highest), 32) for _ in range(16))
    return Workload(name="w3", requests=requests)


def _w4(repeat: int, highest: int) -> Workload:
    rng = random.Random(505 + repeat)
    streams = tuple(_request(_token_ids(rng, 32, highest), 160) for _ in range(8))
    return Workload(name="w4", requests=streams, intruder=_request(_token_ids(rng, 2048, highest), 32))


def _known_prefix(num_shared: int, repeat: int, highest: int) -> Workload:
    prefix = _token_ids(random.Random(606), num_shared, highest)
    rng = random.Random(707 + repeat)
    requests = tuple(_request(prefix + _token_ids(rng, 50, highest), 50) for _ in range(16))
    return Workload(name=f"prefix-{num_shared}", requests=requests)


def _mixed(repeat: int, highest: int) -> Workload:
    lengths = random.Random(808)
    outputs = [lengths.randint(8, 32) for _ in range(56)] + 8 * [256]
    lengths.shuffle(outputs)
    rng = random.Random(909 + repeat)
    return Workload(name="mixed", requests=tuple(_request(_token_ids(rng, 32, highest), length) for length in outputs))


def _sized(name: str, sizes: list[tuple[int, int]], repeat: int, highest: int) -> Workload:
    """Requests of these lengths in and out, in an order that is always the same."""
    random.Random(1010).shuffle(sizes)
    rng = random.Random(1111 + repeat)
    requests = tuple(_request(_token_ids(rng, num_in, highest), num_out) for num_in, num_out in sizes)
    return Workload(name=name, requests=requests)


def _lengths(repeat: int, highest: int) -> Workload:
    return _sized("lengths", 54 * [(32, 32)] + 6 * [(1436, 64)], repeat, highest)


def _full(repeat: int, highest: int) -> Workload:
    return _sized("full", 24 * [(480, 128)], repeat, highest)


def _short(repeat: int, highest: int) -> Workload:
    lengths = random.Random(1212)
    return _sized("short", [(lengths.randint(16, 64), 32) for _ in range(32)], repeat, highest)


def _long(repeat: int, highest: int) -> Workload:
    return _sized("long", 6 * [(1024, 64)], repeat, highest)


_MAKERS: dict[str, Callable[[int, int], Workload]] = {
    "w1": _w1,
    "w2": _w2,
    "w3": _w3,
    "w4": _w4,
    "mixed": _mixed,
    "lengths": _lengths,
    "full": _full,
    "short": _short,
    "long": _long,
    "prefix-200": partial(_known_prefix, 200),
    "prefix-1500": partial(_known_prefix, 1500),
}


def _token_ids(rng: random.Random, count: int, highest: int) -> tuple[int, ...]:
    return tuple(rng.randrange(LOWEST_TOKEN_ID, highest) for _ in range(count))


def _request(prompt: tuple[int, ...], max_tokens: int) -> BenchRequest:
    return BenchRequest(prompt=prompt, max_tokens=max_tokens)


def _parse_line(path: Path, number: int, line: str) -> BenchRequest:
    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{path}, line {number}: {why}")

    try:
        raw = json.loads(line)
    except ValueError as error:
        raise refuse(f"not JSON: {error}") from None
    if not isinstance(raw, dict) or type(raw.get("max_tokens")) is not int or raw["max_tokens"] < 1:
        raise refuse("needs max_tokens, a whole number from 1")
    max_tokens = raw["max_tokens"]
    match raw:
        case {"prompt": str(text)}:
            return BenchRequest(prompt=text, max_tokens=max_tokens, has_fixed_length=False)
        case {"prompt": list(ids)} if ids and all(type(i) is int for i in ids):
            return BenchRequest(prompt=tuple(ids), max_tokens=max_tokens, has_fixed_length=False)
        case {"messages": list(messages)} if messages and all(isinstance(m, dict) for m in messages):
            return BenchRequest(messages=tuple(messages), max_tokens=max_tokens, has_fixed_length=False)
    raise refuse("needs prompt (text or token ids) or messages")
