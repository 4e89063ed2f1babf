"""`quire bench growth`: how the cost of a step grows with what grows: batch, context, cache size, waiting requests,
workers.

Everything runs in this process, without services. Batch, context and cache size are measured with a model. The cache
size and the number of waiting requests are measured once more with a model that takes no time (`NullRunner`), where a
term that should not be there cannot hide; for waiting requests the scheduler's policy is asked, too. What should stay
flat is said in the chart's title.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from quire.bench import machine, report, stepping
from quire.bench.bounds import STORAGES, Bounds
from quire.bench.limits import NO_LIMITS
from quire.bench.model_cache import ensure_model
from quire.bench.model_shapes import SHAPES
from quire.bench.progress import say
from quire.bench.queued_policy import QueuedPolicy
from quire.bench.stepping import Bench, NullRunner, TimedSteps
from quire.bench.svg import Lines, render
from shared import config
from shared.config import EngineConfig
from shared.errors import ConfigError
from shared.flags import setting

if TYPE_CHECKING:
    from gpu_worker.model.runner import DecoderRunner

BLOCK_SIZE = 16
CONTEXT = 256
NUM_WARM_UP = 2
NULL_BATCH = 8
MAX_NUM_SEQS = 128
BUDGET = 512

Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: the points of each axis, and how many steps (or events) at each."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_256)
    caches: tuple[int, ...] = (1024, 4096, 16_384, 65_536)
    null_caches: tuple[int, ...] = (1024, 16_384, 262_144, 1_048_576)
    queues: tuple[int, ...] = (1, 10, 100, 1000, 10_000)
    policy_queues: tuple[int, ...] = (1, 10, 100, 1000, 10_000, 100_000)
    workers: tuple[int, ...] = (1, 10, 100, 1000)
    policy_waiting: int = 10_000
    steps: int = 30
    null_steps: int = 200


QUICK = Sizes(batches=(1, 2), contexts=(32, 64), caches=(64, 128), null_caches=(64, 1024), queues=(1, 100),
              policy_queues=(1, 100), workers=(1, 10), policy_waiting=100, steps=2, null_steps=10)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthConfig:
    model: str = setting("tiny", "random model to measure with", choices=tuple(SHAPES), is_positional=True)
    engine_flags: str = setting("", 'more flags for the worker, in one argument: "--num-threads 2"')
    only: str = setting("all", "what to measure; policy: the scheduler's policy, no model", choices=("all", "policy"))
    out: str = setting("benchmarks/results", "folder for the JSON and the plots")
    cache_dir: str = setting("", "folder of the random models; default: ~/.cache/quire")
    quick: bool = setting(False, "a test model and few points: does it all work? No figures to quote")


def main(argv: list[str]) -> int:
    """Run the command. Raises `ConfigError`."""
    settings = config.load(GrowthConfig, argv, program="quire bench growth", description=__doc__ or "")
    folder = report.make_folder("--out", settings.out)
    sizes = QUICK if settings.quick else Sizes()
    if settings.quick:
        settings = GrowthConfig(**asdict(settings) | {"model": "test"})
    charts = measure(settings, sizes)
    about = machine.describe()
    document = {
        "date": report.today(), "machine": about, "settings": report.shown(settings), "sizes": asdict(sizes),
        "charts": [asdict(chart) for chart in charts],
    }  # fmt: skip
    subject = settings.model if settings.only == "all" else "the scheduler's policy"
    title = f"quire {about['commit']}, {document['date']}, {subject}, {about['cores']} cores of {about['cpu']}"
    print("\n\n".join(map(format_chart, charts)))
    name = settings.model if settings.only == "all" else settings.only
    for path in report.write(folder, f"growth-{name}", document, render(title, charts)):
        print(f"written: {path}")
    return 0


def measure(settings: GrowthConfig, sizes: Sizes) -> list[Lines]:
    """All charts. Raises `ConfigError` when the model or a flag does not allow them."""
    if settings.only == "policy":
        return _policy_charts(sizes)
    batch_ms, batch_rate = _by_batch(settings, sizes)
    decode_ms, chunk_ms = _by_context(settings, sizes)
    cache_ms = _by_cache(settings, sizes)
    null_cache_us = _null_by_cache(sizes)
    queue_us = _null_by_queue(sizes)
    steps, micros = "ms a step", "µs"
    return [
        _chart("batch", "sequences that decode", steps, batch_ms),
        _chart("batch: throughput", "sequences that decode", "tokens/s", batch_rate),
        _chart("context: a token of one sequence", "tokens in the context", steps, decode_ms),
        _chart("context: a chunk of a prompt", "tokens in the context", steps, chunk_ms),
        _chart("cache size (flat), batch 8", "KV blocks there are", steps, cache_ms),
        _chart("cache size (flat), no model", "KV blocks there are", micros, null_cache_us),
        _chart("waiting in the engine (flat), no model", "waiting sequences", micros, queue_us),
        *_policy_charts(sizes),
    ]


def _policy_charts(sizes: Sizes) -> list[Lines]:
    by_queue = _policy(sizes, [(num_waiting, 1) for num_waiting in sizes.policy_queues])
    by_workers = _policy(sizes, [(sizes.policy_waiting, num_workers) for num_workers in sizes.workers])
    queued: Series = {kind: [(waiting, us) for (waiting, _), us in points] for kind, points in by_queue.items()}
    working: Series = {kind: [(workers, us) for (_, workers), us in points] for kind, points in by_workers.items()}
    title = f"workers of the scheduler (flat), {sizes.policy_waiting:,} wait"
    return [
        _chart("waiting in the scheduler (log n at most)", "queued requests", "µs an event", queued),
        _chart(title, "workers", "µs an event", working),
    ]


def format_chart(chart: Lines) -> str:
    """A chart's points as lines of text."""
    xs = sorted({x for points in chart.series.values() for x, _ in points})
    width = max(map(len, [*chart.series, chart.x_label])) + 2
    lines = [f"{chart.title} [{chart.y_label}]", chart.x_label.ljust(width) + "".join(f"{x:12,.0f}" for x in xs)]
    for name, points in chart.series.items():
        values = dict(points)
        cells = (f"{values[x]:12,.2f}" if x in values else " " * 12 for x in xs)
        lines.append(name.ljust(width) + "".join(cells))
    return "\n".join(lines)


def _chart(title: str, x_label: str, y_label: str, series: Series) -> Lines:
    return Lines(title=title, x_label=x_label, y_label=y_label, series=series, is_log_x=True)


def _by_batch(settings: GrowthConfig, sizes: Sizes) -> tuple[Series, Series]:
    """Milliseconds a step (wall and processor time), and tokens/s."""
    num_tokens = CONTEXT + _num_drawn(sizes)
    runner = _load(settings, max(sizes.batches) * _blocks(num_tokens))
    steps: Series = {"wall": [], "processor time": []}
    rates: Series = {"decode": []}
    for batch in sizes.batches:
        say(f"batch {batch}")
        times = _decode(runner, batch, CONTEXT, sizes)
        steps["wall"].append((batch, 1e3 * times.median_s))
        steps["processor time"].append((batch, 1e3 * times.median_cpu_s))
        rates["decode"].append((batch, batch / times.median_s))
    return steps, rates


def _by_context(settings: GrowthConfig, sizes: Sizes) -> tuple[Series, Series]:
    """Milliseconds of a step that decodes, and of the last whole chunk of a prompt, by tokens before them."""
    longest = max(sizes.contexts)
    runner = _load(settings, _blocks(longest + _num_drawn(sizes)))
    if longest + _num_drawn(sizes) > runner.max_model_len:
        raise ConfigError(f"{settings.model} takes {runner.max_model_len} tokens, fewer than the contexts to measure")
    decode: list[tuple[float, float]] = []
    chunks: list[tuple[float, float]] = []
    for context in sizes.contexts:
        say(f"context {context:,}: computing the prompt")
        bench, prompt = _prefill(runner, 1, context, sizes)
        chunks.append((context, 1e3 * prompt.wall_s[-1]))
        bench.step(NUM_WARM_UP)
        decode.append((context, 1e3 * bench.step(sizes.steps).median_s))
        bench.engine.clear()
    return {"one token": decode}, {f"last {BUDGET} tokens of the prompt": chunks}


def _by_cache(settings: GrowthConfig, sizes: Sizes) -> Series:
    steps: Series = {"wall": [], "processor time": []}
    for num_blocks in sizes.caches:
        say(f"cache of {num_blocks:,} blocks")
        runner = _load(settings, num_blocks)
        times = _decode(runner, NULL_BATCH, 2 * BLOCK_SIZE, sizes)
        steps["wall"].append((num_blocks, 1e3 * times.median_s))
        steps["processor time"].append((num_blocks, 1e3 * times.median_cpu_s))
    return steps


def _null_by_cache(sizes: Sizes) -> Series:
    series: Series = {"step": [], "view": []}
    for num_blocks in sizes.null_caches:
        say(f"cache of {num_blocks:,} blocks, no model")
        _note(series, num_blocks, _null_steps(num_blocks, 0, sizes))
    return series


def _null_by_queue(sizes: Sizes) -> Series:
    series: Series = {"step": [], "view": []}
    for num_waiting in sizes.queues:
        say(f"{num_waiting:,} waiting in the engine")
        _note(series, num_waiting, _null_steps(4096, num_waiting, sizes))
    return series


def _policy(sizes: Sizes, cells: list[tuple[int, int]]) -> dict[str, list[tuple[tuple[int, int], float]]]:
    """Microseconds of each kind of event in each cell of (waiting requests, workers)."""
    series: dict[str, list[tuple[tuple[int, int], float]]] = {}
    for num_waiting, num_workers in cells:
        say(f"{num_waiting:,} waiting in the scheduler, {num_workers:,} workers")
        count = max(sizes.null_steps, 2 * num_workers)
        for kind, seconds in QueuedPolicy(num_waiting, num_workers).time_events(count).items():
            series.setdefault(kind, []).append(((num_waiting, num_workers), 1e6 * seconds))
    return series


def _note(series: Series, x: float, times: TimedSteps) -> None:
    series["step"].append((x, 1e6 * times.median_s))
    series["view"].append((x, 1e6 * times.median_view_s))


def _null_steps(num_blocks: int, num_waiting: int, sizes: Sizes) -> TimedSteps:
    """Steps of eight sequences without a model; after each of them one ends, another is admitted and a new one comes,
    so that `num_waiting` wait at the beginning of every step."""
    bench = Bench(NullRunner(num_blocks), _limits(NULL_BATCH), max_model_len=4096)
    total = NULL_BATCH + num_waiting + sizes.null_steps
    sequences = [
        stepping.make_sequence(rank, [1] * BLOCK_SIZE, max_tokens=min(rank + 1, NULL_BATCH)) for rank in range(total)
    ]
    bench.add(sequences[: NULL_BATCH + num_waiting])
    coming = iter(sequences[NULL_BATCH + num_waiting :])
    return bench.step(sizes.null_steps, before_each=lambda: bench.add([next(coming)]))


def _decode(runner: DecoderRunner, count: int, length: int, sizes: Sizes) -> TimedSteps:
    """Steps in which each of `count` sequences of `length` tokens gets a token."""
    bench, _ = _prefill(runner, count, length, sizes)
    bench.step(NUM_WARM_UP)
    times = bench.step(sizes.steps)
    bench.engine.clear()
    return times


def _prefill(runner: DecoderRunner, count: int, length: int, sizes: Sizes) -> tuple[Bench, TimedSteps]:
    """An engine with the prompts of `count` sequences computed, and the steps that this took."""
    bench = Bench(runner, _limits(MAX_NUM_SEQS), max_model_len=runner.max_model_len)
    sequences = [
        stepping.make_sequence(rank, prompt, max_tokens=_num_drawn(sizes) + 1)
        for rank, prompt in enumerate(stepping.random_prompts(count, length, runner.vocab_size))
    ]
    bench.add(sequences)
    return bench, bench.step_until_drawn(sequences)


def _limits(max_num_seqs: int) -> EngineConfig:
    return EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=BUDGET, max_step_ms=stepping.NO_STEP_LIMIT_MS)


def _load(settings: GrowthConfig, num_blocks: int) -> DecoderRunner:
    """The model with a cache of that many blocks."""
    from gpu_worker.model.assembly import load_runner

    folder = ensure_model(settings.model, settings.cache_dir)
    shape = SHAPES[settings.model]
    num_tokens = num_blocks * BLOCK_SIZE
    num_bytes = num_tokens * Bounds(shape, STORAGES["bf16"], NO_LIMITS).kv_token_bytes
    sizes = {
        "block-size": BLOCK_SIZE, "max-num-seqs": MAX_NUM_SEQS, "max-num-batched-tokens": BUDGET,
        "kv-cache-memory-bytes": num_bytes, "max-model-len": min(num_tokens, shape.max_model_len),
    }  # fmt: skip
    argv = [f"--{name}={value}" for name, value in sizes.items()]
    worker = stepping.worker_config(folder, settings.engine_flags, *argv)
    return load_runner(worker)


def _num_drawn(sizes: Sizes) -> int:
    """Tokens that each sequence draws."""
    return 1 + NUM_WARM_UP + sizes.steps


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
