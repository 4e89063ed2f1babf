"""How often tokens differ in bfloat16 by what runs beside them: `python -m tests.faults.measure_bf16`.

With the CPU kernels, and in float32 without them, the answer should be never. In bfloat16 on torch nothing is promised,
so it is measured with 32 streams of the default model: on one worker, each of them alone against all at once; and on
three workers, one of which is killed under way, against the same streams undisturbed. Arguments: dtypes, and flags of
`quire serve`, as `bfloat16 --cpu-kernels=off`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.cell import Cell
from tests.faults.streams import StreamRecord, follow_all

NUM_STREAMS = 32
NUM_TOKENS = 64
TIMEOUT_S = 3000


def _bodies(temperature: float) -> dict[str, dict[str, Any]]:
    rng = random.Random(1)
    return {
        str(i): {
            "model": "SmolLM2-135M-Instruct",
            "prompt": [rng.randrange(300, 30_000) for _ in range(rng.randint(16, 128))],
            "max_tokens": NUM_TOKENS,
            "temperature": temperature,
            "seed": i,
            "ignore_eos": True,
            "stream": True,
        }
        for i in range(NUM_STREAMS)
    }


def _run(temperature: float, folder: Path, *flags: str) -> dict[str, StreamRecord]:
    folder.mkdir()
    cell = Cell(None, folder, "--workers=3", "--num-threads=1", "--worker-lease-s=1.5", *flags)
    try:
        return asyncio.run(follow_all(cell.url, _bodies(temperature), timeout_s=TIMEOUT_S))
    finally:
        cell.close()


async def _complete(url: str, bodies: dict[str, dict[str, Any]], *, at_once: int) -> list[list[str]]:
    """The tokens of each, `at_once` of them at a time."""
    places = asyncio.Semaphore(at_once)

    async def complete(session: aiohttp.ClientSession, body: dict[str, Any]) -> list[str]:
        asked = body | {"stream": False, "logprobs": 0}
        async with places, session.post(url + "/v1/completions", json=asked) as answer:
            assert answer.status == 200, await answer.text()
            tokens: list[str] = (await answer.json())["choices"][0]["logprobs"]["tokens"]
            return tokens

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        return await asyncio.gather(*(complete(session, body) for body in bodies.values()))


def _measure_company(dtype: str, temperature: float, folder: Path, *flags: str) -> None:
    folder.mkdir()
    patience = (f"--request-timeout-s={TIMEOUT_S}", "--worker-lease-s=60")  # a stream that moved would not be alone
    cell = Cell(None, folder, f"--dtype={dtype}", "--num-threads=1", *patience, *flags)
    try:
        bodies = _bodies(temperature)
        beside = asyncio.run(_complete(cell.url, bodies, at_once=NUM_STREAMS))
        alone = asyncio.run(_complete(cell.url, bodies, at_once=1))
    finally:
        cell.close()
    equal = [_count_equal(*pair) for pair in zip(alone, beside, strict=True)]
    differing = sum(count < NUM_TOKENS for count in equal)
    # The tokens behind the first one that differs follow another text and tell nothing.
    print(f"{dtype} temperature {temperature}: alone and among {NUM_STREAMS - 1} others: {differing} of {NUM_STREAMS} "
          f"streams differ, {differing} of {sum(equal) + differing} tokens", flush=True)  # fmt: skip


def _count_equal(left: list[str], right: list[str]) -> int:
    """Tokens before the first that differs."""
    assert len(left) == len(right) == NUM_TOKENS
    return next((i for i, (one, other) in enumerate(zip(left, right, strict=True)) if one != other), NUM_TOKENS)


def _measure_kill(dtype: str, temperature: float, folder: Path, *flags: str) -> None:
    folder.mkdir()
    quiet = _run(temperature, folder / "a", f"--dtype={dtype}", *flags)
    again = _run(temperature, folder / "b", f"--dtype={dtype}", *flags)
    armed = f"--failpoints=worker.before_commit=kill@30#{folder}/latch"
    killed = _run(temperature, folder / "c", f"--dtype={dtype}", armed, *flags)
    for label, other in (("undisturbed twice", again), ("a worker killed", killed)):
        assert all(record.ending == "done" for record in other.values())
        differing = sum(other[name].texts != quiet[name].texts for name in quiet)
        print(f"{dtype} temperature {temperature}: {label}: {differing} of {NUM_STREAMS} streams differ", flush=True)


def main() -> None:
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    for dtype in [argument for argument in sys.argv[1:] if argument not in flags] or ["bfloat16"]:
        for measure in (_measure_company, _measure_kill):
            for temperature in (0.0, 1.0):
                with tempfile.TemporaryDirectory(prefix="qb-") as name:
                    measure(dtype, temperature, Path(name) / "cells", *flags)


if __name__ == "__main__":
    main()
