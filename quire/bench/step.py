"""`quire bench step`: how long a step of the engine takes, and with --profile where its time goes; in this process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire import checkpoint
from quire.bench import machine, stepping
from quire.bench.model_cache import ensure_model
from quire.bench.model_shapes import SHAPES
from quire.bench.progress import say
from quire.bench.report import shown
from quire.bench.statistics import percentile
from quire.bench.stepping import Bench, TimedSteps
from shared import config
from shared.config import WorkerConfig
from shared.errors import ConfigError, shorten
from shared.flags import setting

NUM_WARM_UP = 3
NUM_TURNS = 3
"""Rounds of steps without and with adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    model: str = setting("tiny", f"folder of a checkpoint, or a random model: {', '.join(SHAPES)}", is_positional=True)
    batch: int = setting(8, "sequences in the batch", minimum=1, maximum=4096)
    context: int = setting(256, "tokens that each of them holds", minimum=1)
    period: int = setting(0, "tokens after which a prompt repeats itself; 0: it does not", minimum=0)
    steps: int = setting(50, "steps to time", minimum=1)
    prefill: bool = setting(False, "time the steps that compute the prompts, not those that follow")
    profile: bool = setting(False, "print where the time goes")
    adapters: int = setting(0, "random adapters that the sequences have in turns; timed beside the same without, in "
                            "turns", minimum=0, maximum=256)  # fmt: skip
    adapter_rank: int = setting(16, "rank of these", minimum=1, maximum=1024)
    engine_flags: str = setting("", 'more flags for the worker, in one argument: "--num-threads 2"')
    json: str = setting("", "write all figures to this file")
    cache_dir: str = setting("", "folder of the random models; default: ~/.cache/quire")
    quick: bool = setting(False, "a test model and few steps: does it all work? No figures to quote")


def main(argv: list[str]) -> int:
    """Run the command. Raises `ConfigError`."""
    settings = config.load(StepConfig, argv, program="quire bench step", description=__doc__ or "")
    if settings.quick:
        settings = StepConfig(**asdict(settings) | {"model": "test", "batch": 2, "context": 40, "steps": 3})
    if settings.json and not Path(settings.json).absolute().parent.is_dir():
        raise ConfigError(f"--json={shorten(settings.json)}: its folder is not there")
    if settings.adapters:
        title, plain, times = compare_adapters(settings)
        print(_format(f"{title}, no adapters", plain, settings))
        print(_format(f"{title}, {settings.adapters} adapters of rank {settings.adapter_rank}", times, settings))
        print(f"throughput with adapters: {plain.median_s / times.median_s:.3f} of that without")
    else:
        title, times = measure(settings)
        print(_format(title, times, settings))
    if settings.json:
        Path(settings.json).write_text(json.dumps(_document(settings, times), indent=2) + "\n", encoding="utf-8")
        print(f"all figures are in {settings.json}")
    return 0


def measure(settings: StepConfig) -> tuple[str, TimedSteps]:
    """What was measured, in words, and the times.

    Raises:
        ConfigError: no such model, or it does not take such a batch.
    """
    from gpu_worker.model.assembly import load_runner

    worker, folder = _worker(settings)
    runner = load_runner(worker)
    speculation = worker.engine.speculation()
    most_drawn = 1 if speculation is None else 1 + speculation.num_tokens
    num_tokens = settings.context + (NUM_WARM_UP + settings.steps) * most_drawn + 1
    if num_tokens > runner.max_model_len:
        raise ConfigError(f"--context={settings.context}: with all steps {num_tokens} tokens; this model takes "
                          f"{runner.max_model_len} here")  # fmt: skip
    if settings.batch * -(-num_tokens // runner.block_size) > runner.num_blocks:
        raise ConfigError(f"--batch={settings.batch}: its KV does not fit; add --kv-cache-memory-bytes to "
                          "--engine-flags")  # fmt: skip
    bench = Bench(runner, worker.engine, max_model_len=runner.max_model_len)
    prompts = stepping.random_prompts(settings.batch, settings.context, runner.vocab_size, settings.period)
    sequences = [stepping.make_sequence(i, prompt, max_tokens=num_tokens) for i, prompt in enumerate(prompts)]
    bench.add(sequences)
    say(f"computing {settings.batch} prompts of {settings.context} tokens")
    first = bench.step_until_drawn(sequences)
    title = f"{folder.name}, {runner.dtype} on {runner.device}, batch {settings.batch}, context {settings.context}"
    if settings.prefill:
        return f"{title}, prompts", first
    bench.step(NUM_WARM_UP)
    return title, bench.step(settings.steps)


def compare_adapters(settings: StepConfig) -> tuple[str, TimedSteps, TimedSteps]:
    """What was measured, in words, and the times of steps without and with adapters, which took turns.

    Raises:
        ConfigError: as `measure`.
    """
    from gpu_worker.model.assembly import load_runner
    from quire.bench.random_adapter import add_random_adapters

    worker, folder = _worker(settings, f"--max-loras={settings.adapters}", "--enable-lora",
                             f"--max-lora-rank={settings.adapter_rank}")  # fmt: skip
    runner = load_runner(worker)
    adapters = add_random_adapters(runner, folder, settings.adapters, settings.adapter_rank)
    num_tokens = settings.context + NUM_WARM_UP + settings.steps + 1
    prompts = stepping.random_prompts(settings.batch, settings.context, runner.vocab_size, 0)
    times: dict[bool, list[TimedSteps]] = {False: [], True: []}
    for turn in range(2 * NUM_TURNS):
        is_adapted, bench = turn % 2 == 1, Bench(runner, worker.engine, max_model_len=runner.max_model_len)
        sequences = [stepping.make_sequence(i, prompt, max_tokens=num_tokens) for i, prompt in enumerate(prompts)]
        for i, sequence in enumerate(sequences if is_adapted else ()):
            sequence.adapter = adapters[i % len(adapters)]
        bench.add(sequences)
        bench.step_until_drawn(sequences)
        bench.step(NUM_WARM_UP)
        times[is_adapted].append(bench.step(settings.steps))
        bench.engine.clear()
    title = f"{folder.name}, {runner.dtype} on {runner.device}, batch {settings.batch}, context {settings.context}"
    return title, stepping.join(times[False]), stepping.join(times[True])


def _worker(settings: StepConfig, *flags: str) -> tuple[WorkerConfig, Path]:
    """The worker's settings, and the model's folder."""
    if settings.model in SHAPES:
        folder = ensure_model(settings.model, settings.cache_dir)
    else:
        folder = checkpoint.resolve(settings.model, Path(), say)
    worker = stepping.worker_config(
        folder,
        settings.engine_flags,
        f"--max-num-seqs={max(settings.batch, 128)}",
        f"--max-step-ms={stepping.NO_STEP_LIMIT_MS}",
        *flags,
    )
    say(f"loading {folder}")
    return worker, folder


def _format(title: str, times: TimedSteps, settings: StepConfig) -> str:
    wall_ms = [1000 * seconds for seconds in times.wall_s]
    num_tokens = settings.batch * settings.context if settings.prefill else times.num_drawn
    lines = [
        f"{title}: {len(wall_ms)} steps",
        f"  median {1000 * times.median_s:.3f} ms a step (p90 {percentile(wall_ms, 90):.3f}), "
        f"{num_tokens / sum(times.wall_s):,.0f} tokens/s, processor time {1000 * times.median_cpu_s:.3f} ms a step",
    ]
    if times.num_drafted:
        share = times.num_accepted / times.num_drafted
        lines.append(f"  drafts: {times.num_drafted} tokens, {100 * share:.0f} % of them right, "
                     f"{times.num_drawn / settings.batch / len(wall_ms):.2f} tokens a step and sequence")  # fmt: skip
    return "\n".join([*lines, stepping.describe(times)] if settings.profile else lines)


def _document(settings: StepConfig, times: TimedSteps) -> dict[str, Any]:
    return {"settings": shown(settings), "machine": machine.describe(), "times": asdict(times)}
