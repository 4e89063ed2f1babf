"""How often streams differ in bfloat16 when a worker is killed under them: `python -m tests.faults.measure_bf16`.

With the CPU kernels, and in float32 without them, the answer should be never. In bfloat16 on torch nothing is promised,
so it is measured: 32 streams of the default model on three workers, one of which is killed under way, against the same
streams undisturbed. Arguments: dtypes, and flags of `quire serve`, as `bfloat16 --cpu-kernels=off`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.cell import Cell
from tests.faults.streams import StreamRecord, follow_all

NUM_STREAMS = 32
NUM_TOKENS = 64


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
        return asyncio.run(follow_all(cell.url, _bodies(temperature), timeout_s=600))
    finally:
        cell.close()


def main() -> None:
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    for dtype in [argument for argument in sys.argv[1:] if argument not in flags] or ["bfloat16"]:
        for temperature in (0.0, 1.0):
            with tempfile.TemporaryDirectory(prefix="qb-") as name:
                folder = Path(name)
                quiet = _run(temperature, folder / "a", f"--dtype={dtype}", *flags)
                again = _run(temperature, folder / "b", f"--dtype={dtype}", *flags)
                armed = f"--failpoints=worker.before_commit=kill@30#{folder}/latch"
                killed = _run(temperature, folder / "c", f"--dtype={dtype}", armed, *flags)
            for label, other in (("undisturbed twice", again), ("a worker killed", killed)):
                assert all(record.ending == "done" for record in other.values())
                differing = sum(other[name].texts != quiet[name].texts for name in quiet)
                print(f"{dtype} temperature {temperature}: {label}: {differing} of {NUM_STREAMS} streams differ")


if __name__ == "__main__":
    main()
