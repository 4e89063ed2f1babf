"""What this machine can do at most, measured by a small C program (`limits.c`) that is compiled when it is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shared.errors import QuireError

COMPILERS = ("cc", "gcc", "clang")
SOURCE = Path(__file__).with_name("limits.c")
TIMEOUT_S = 120.0


class LimitsUnknown(QuireError):
    """The limits could not be measured; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How thoroughly to measure: MiB read, repeats of which medians are taken, rounds of multiply-adds."""

    mib: int = 1024
    repeats: int = 9
    rounds: int = 20_000_000


QUICK = Effort(mib=64, repeats=3, rounds=1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Medians. Bytes/s read by one thread and by all `threads`; operations/s (a multiply-add is two) by all threads,
    None where the processor has no instruction for products of that type."""

    threads: int
    read_one: float
    read: float
    f32: float
    bf16: float | None
    int8: float | None

    def rate(self, number_type: str) -> float:
        """Operations/s for products of `number_type` (bf16 or int8), in f32 where there is nothing for it."""
        rate: float | None = getattr(self, number_type)
        return self.f32 if rate is None else rate


NO_LIMITS = Limits(threads=1, read_one=1, read=1, f32=1, bf16=None, int8=None)
"""Stands in where nothing is asked that depends on the machine."""


def measure(effort: Effort, threads: int | None = None) -> Limits:
    """The limits of `threads` threads; None: one for each core of this process. Takes seconds.

    Raises:
        LimitsUnknown: there is no C compiler, or the program does not build or run here.
    """
    threads = threads or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="quire-limits-") as folder:
        program = _compile(Path(folder))
        numbers = (threads, effort.mib, effort.repeats, effort.rounds)
        return _parse(_run([str(program), *map(str, numbers)]))


def better(first: Limits, second: Limits) -> Limits:
    """The larger of each figure: what two measurements of one machine show that it can do."""

    def larger(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else max(one, other)

    return Limits(
        threads=first.threads, read_one=max(first.read_one, second.read_one), read=max(first.read, second.read),
        f32=max(first.f32, second.f32), bf16=larger(first.bf16, second.bf16), int8=larger(first.int8, second.int8),
    )  # fmt: skip


def describe(limits: Limits) -> str:
    """One line for people."""
    peaks = ((name, getattr(limits, name)) for name in ("f32", "bf16", "int8"))
    rates = ", ".join(f"{name} {'none' if rate is None else f'{rate / 1e9:.0f}'}" for name, rate in peaks)
    return (
        f"memory reads {limits.read / 1e9:.1f} GB/s ({limits.read_one / 1e9:.1f} by one thread); "
        f"peaks of {limits.threads} thread(s) in G operations/s: {rates}"
    )


def _compile(folder: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise LimitsUnknown(f"no C compiler ({', '.join(COMPILERS)}) is installed")
    program = folder / "limits"
    _run([compiler, "-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(program)])
    return program


def _run(command: list[str]) -> str:
    """Its standard output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip().splitlines()[:1] or [f"exit code {error.returncode}"]
        raise LimitsUnknown(f"{Path(command[0]).name}: {reason[0]}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LimitsUnknown(f"{Path(command[0]).name}: {error}") from None
    return done.stdout


def _parse(text: str) -> Limits:
    raw = json.loads(text)

    def median(name: str) -> float:
        return float(raw[name]["median"])

    def median_or_none(name: str) -> float | None:
        return None if raw[name] is None else median(name)

    return Limits(
        threads=raw["threads"], read_one=median("read_one"), read=median("read"), f32=median("f32"),
        bf16=median_or_none("bf16"), int8=median_or_none("int8"),
    )  # fmt: skip
