"""`quire bench gpu`: time each kernel against what this card can do, and decode end to end, and write it all as JSON.

The limits are measured in the same run (a large copy for memory, a large matrix product for arithmetic), so no table
of cards is needed. Before each timed call the level-2 cache is overwritten; times are CUDA events around one call,
medians. A kernel whose result differs from its reference is not timed: the run names it and exits with 1.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench import machine
from shared import config
from shared.config import EngineConfig, ModelConfig, WorkerConfig
from shared.errors import ConfigError, shorten
from shared.flags import setting
from shared.paths import expand

if TYPE_CHECKING:
    from quire.bench.gpu_cases import KernelCase

FLUSHED_BYTES = 256 << 20  # more than any card's level-2 cache
LIMIT_BYTES = 2 << 30
LIMIT_SIDE = 8192
TOLERANCE = 3e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBenchConfig:
    json: str = setting("", "write all figures to this file; default: benchmarks/results/gpu-CARD.json")
    model: str = setting("", "folder of the model that decodes; default: one of 0.5B with random weights, made anew")
    paper: bool = setting(False, "print what data sheets allow for each kernel, and measure nothing; needs no card")
    repeats: int = setting(30, "timed calls of each kernel; medians are shown", minimum=3)
    num_seqs: int = setting(32, "sequences that decode", minimum=1)
    context: int = setting(1024, "prompt tokens of each", minimum=1)
    steps: int = setting(64, "decode steps that are timed", minimum=1)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this card did in this run."""

    bytes_per_s: float
    operations_per_s: float

    def least_s(self, case: KernelCase) -> float:
        """The shortest time that `case` can take."""
        return max(case.moved_bytes / self.bytes_per_s, case.operations / self.operations_per_s)


def main(argv: list[str]) -> int:
    """Run the command; 1 if a kernel's result is wrong.

    Raises:
        ConfigError: no CUDA device, or the model or file cannot be used.
    """
    settings = config.load(GpuBenchConfig, argv, program="quire bench gpu", description=__doc__ or "")
    if settings.paper:
        from quire.bench.gpu_paper import paper_table

        print(paper_table())
        return 0
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("quire bench gpu needs a CUDA device, and torch finds none here")
    card = torch.cuda.get_device_name()
    path = Path(settings.json or f"benchmarks/results/gpu-{re.sub('[^A-Za-z0-9]+', '-', card)}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"--json={shorten(path)}: {error.strerror}") from None
    limits = measure_limits(settings.repeats)
    print(f"{card}: {limits.bytes_per_s / 1e9:.0f} GB/s, {limits.operations_per_s / 1e12:.0f} TFLOP/s in bfloat16")
    reports = measure_kernels(limits, settings.repeats)
    decode = _measure_decode(settings)
    document = {
        "card": card,
        "capability": list(torch.cuda.get_device_capability()),
        "machine": machine.describe(),
        "limits": {"bytes_per_s": limits.bytes_per_s, "operations_per_s": limits.operations_per_s},
        "kernels": reports,
        "decode": decode,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"all figures are in {path}")
    return 1 if any("error" in report for report in reports) else 0


def measure_limits(repeats: int) -> Limits:
    """A copy within the card's memory, and a product of two large bfloat16 matrices."""
    import torch

    source = torch.zeros(LIMIT_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    left, right = (torch.randn(LIMIT_SIDE, LIMIT_SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copy_s = time_on_card(lambda: target.copy_(source), repeats)
    product_s = time_on_card(lambda: left @ right, repeats)
    return Limits(LIMIT_BYTES / copy_s, 2 * LIMIT_SIDE**3 / product_s)


def measure_kernels(limits: Limits, repeats: int) -> list[dict[str, Any]]:
    """Time, and share of the limit, of each case; prints a line each."""
    import torch

    from quire.bench.gpu_cases import ModelSizes, all_cases

    reports = []
    with torch.inference_mode():
        for case in all_cases(ModelSizes()):
            report: dict[str, Any] = {"name": case.name}
            if wrong := find_difference(case):
                report["error"] = wrong
            else:
                report |= describe_time(case, time_on_card(case.run, repeats), limits)
            reports.append(report)
            print(format_report(report), flush=True)
    return reports


def find_difference(case: KernelCase) -> str | None:
    """How far a call is from the reference, where that is more than rounding."""
    expected, actual = case.check()
    distance = float((expected.double() - actual.double()).abs().max()) if expected.numel() else 0.0
    largest = float(expected.double().abs().max()) if expected.numel() else 0.0
    is_near = distance <= TOLERANCE * max(1.0, largest)  # false for NaN, too
    return None if is_near else f"differs from the reference by {distance}"


def describe_time(case: KernelCase, seconds: float, limits: Limits) -> dict[str, Any]:
    """The figures of one case."""
    return {
        "us": seconds * 1e6,
        "limit_us": limits.least_s(case) * 1e6,
        "share_of_limit": limits.least_s(case) / seconds,
        "bytes_per_s": case.moved_bytes / seconds,
        "operations_per_s": case.operations / seconds,
    }


def format_report(report: dict[str, Any]) -> str:
    """One line."""
    if "error" in report:
        return f"{report['name']:56} WRONG: {report['error']}"
    return (
        f"{report['name']:56}{report['us']:10.1f} us{report['share_of_limit']:8.2f} of the limit"
        f"{report['bytes_per_s'] / 1e9:8.0f} GB/s{report['operations_per_s'] / 1e12:7.0f} TFLOP/s"
    )


def time_on_card(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one call with a cold level-2 cache: the median of `repeats`, after three that are not counted."""
    import torch

    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    taken_ms: list[float] = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flushed.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        taken_ms.append(start.elapsed_time(end))
    return statistics.median(taken_ms[3:]) / 1e3


def _measure_decode(settings: GpuBenchConfig) -> dict[str, Any]:
    if settings.model:
        return measure_decode(expand("--model", settings.model), settings, "cuda")
    from quire.bench.random_model import write_random_model

    with tempfile.TemporaryDirectory() as folder:
        return measure_decode(write_random_model("q05b", Path(folder) / "q05b"), settings, "cuda")


def measure_decode(folder: Path, settings: GpuBenchConfig, device: str) -> dict[str, Any]:
    """Prompts computed and tokens decoded by the model in `folder`, no service around it; prints a line.

    Raises:
        ConfigError: the model cannot be loaded, or its cache does not hold the sequences.
    """
    from quire.bench.gpu_decode import decode

    engine = EngineConfig(device=device, max_num_seqs=settings.num_seqs, max_num_batched_tokens=2048)
    worker = WorkerConfig(model=ModelConfig(model=str(folder)), engine=engine)
    started_at = time.monotonic()
    figures = decode(worker, num_seqs=settings.num_seqs, context=settings.context, steps=settings.steps)
    print(
        f"decode, {settings.num_seqs} x {settings.context}: {figures['step_ms']:.2f} ms a step, "
        f"{figures['tokens_per_s']:.0f} tokens/s; prompts {figures['prompt_tokens_per_s']:.0f} tokens/s "
        f"({time.monotonic() - started_at:.0f} s in all)"
    )
    return {"model": folder.name, **figures}
