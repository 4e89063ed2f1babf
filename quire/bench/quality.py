"""`quire bench quality`: what saving memory costs in quality; each variant of a worker beside the plain one.

Two figures for each, over a fixed text: **perplexity**, token by token as in decode, so every key and value is read
back from the cache; and **agreement** with the plain worker. Of positions: how often the likeliest next token of the
text is the same one. Of answers: how many greedy continuations of prompts (passages of the text) are the same to the
end, and which share of their tokens comes before the first difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.assembly import load_runner
from gpu_worker.model.runner import DecoderRunner
from quire import checkpoint
from quire.bench import machine, stepping
from quire.bench.progress import say
from quire.bench.report import shown
from shared import config
from shared.errors import ConfigError, shorten
from shared.flags import setting
from shared.paths import cache_folder

TEXT = Path(__file__).parents[2] / "benchmarks" / "quality.txt"
PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    model: str = setting("", "folder of a checkpoint; none: SmolLM2-135M-Instruct", is_positional=True)
    kv_cache_dtype: tuple[str, ...] = setting(("int8", "fp8"), "KV dtypes to compare with the plain worker")
    variants: str = setting("", "more to compare: flags of workers, one worker's from the next by a semicolon: "
                            '"--quantization=int8; --quantization=int4"')  # fmt: skip
    engine_flags: str = setting("", 'flags of all of them, in one argument: "--num-threads 2"')
    text: str = setting(str(TEXT), "file with the text")
    window: int = setting(512, "tokens of the text that are read together", minimum=2)
    prompts: int = setting(50, "prompts to continue", minimum=1)
    prompt_len: int = setting(40, "tokens of a prompt", minimum=1)
    answer_len: int = setting(32, "tokens of an answer", minimum=1)
    json: str = setting("", "write all figures to this file")
    cache_dir: str = setting("", "folder of the default model; default: ~/.cache/quire")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a worker makes of the text: log-likelihood of each token, and the token it found likeliest in its place;
    its answers to the prompts; and how many tokens a gibibyte of its cache holds."""

    log_likelihoods: list[float]
    likeliest: list[int]
    answers: list[list[int]]
    tokens_per_gib: int

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.log_likelihoods) / len(self.log_likelihoods))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A variant beside the plain worker. Shares are of 1."""

    name: str
    tokens_per_gib: int
    perplexity: float
    perplexity_change: float
    same_positions: float
    same_answers: int
    tokens_before_difference: float


def main(argv: list[str]) -> int:
    """Run the command. Raises `ConfigError`."""
    settings = config.load(QualityConfig, argv, program="quire bench quality", description=__doc__ or "")
    if settings.json and not Path(settings.json).absolute().parent.is_dir():
        raise ConfigError(f"--json={shorten(settings.json)}: its folder is not there")
    folder = checkpoint.resolve(settings.model, cache_folder(settings.cache_dir), say)
    tokens = _read_tokens(folder, settings)
    readings = {name: _read(folder, flags, tokens, settings) for name, flags in _variants(settings).items()}
    plain = readings[PLAIN]
    results = [compare(name, plain, reading) for name, reading in readings.items()]
    print(_format(f"{folder.name}: {len(plain.likeliest)} positions, {len(plain.answers)} prompts", results))
    if settings.json:
        figures = {
            "settings": shown(settings),
            "machine": machine.describe(),
            "results": [asdict(r) for r in results],
        }
        Path(settings.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"all figures are in {settings.json}")
    return 0


def compare(name: str, plain: Reading, own: Reading) -> Quality:
    """How `own` differs from `plain`."""
    positions, answers = len(plain.likeliest), len(plain.answers)
    agreed = [_same_tokens(*pair) for pair in zip(plain.answers, own.answers, strict=True)]
    return Quality(
        name=name,
        tokens_per_gib=own.tokens_per_gib,
        perplexity=own.perplexity,
        perplexity_change=own.perplexity / plain.perplexity - 1,
        same_positions=sum(a == b for a, b in zip(plain.likeliest, own.likeliest, strict=True)) / positions,
        same_answers=sum(a == b for a, b in zip(plain.answers, own.answers, strict=True)),
        tokens_before_difference=sum(agreed) / sum(map(len, plain.answers)) if answers else 1.0,
    )


def _same_tokens(expected: list[int], actual: list[int]) -> int:
    """How many tokens are the same up to the first that differs."""
    same = 0
    for a, b in zip(expected, actual, strict=True):
        if a != b:
            break
        same += 1
    return same


def _variants(settings: QualityConfig) -> dict[str, str]:
    """Names and flags, the plain one first."""
    kept = {f"--kv-cache-dtype={name}": f"--kv-cache-dtype={name}" for name in settings.kv_cache_dtype}
    more = [flags.strip() for flags in settings.variants.split(";") if flags.strip()]
    return {PLAIN: ""} | kept | {flags: flags for flags in more}


def _read_tokens(folder: Path, settings: QualityConfig) -> list[int]:
    try:
        text = Path(settings.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text={shorten(settings.text)}: {error}") from None
    tokens: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    if len(tokens) < settings.prompt_len + settings.prompts:
        raise ConfigError(f"--text={shorten(settings.text)}: {len(tokens)} tokens are too few for the prompts")
    return tokens


def _read(folder: Path, flags: str, tokens: list[int], settings: QualityConfig) -> Reading:
    """What the worker with `flags` makes of the text."""
    worker = stepping.worker_config(folder, f"{settings.engine_flags} {flags}")
    say(f"loading {folder.name} {flags}".rstrip())
    runner = load_runner(worker)
    windows = [tokens[i : i + settings.window] for i in range(0, len(tokens), settings.window)]
    say(f"reading {len(tokens)} tokens in windows of {settings.window}")
    found = list(read_windows(runner, [window for window in windows if len(window) > 1]))
    say(f"continuing {settings.prompts} prompts")
    bench = stepping.Bench(runner, worker.engine, max_model_len=runner.max_model_len)
    return Reading(
        log_likelihoods=[log_likelihood for log_likelihood, _ in found],
        likeliest=[token for _, token in found],
        answers=_continue_prompts(bench, tokens, settings),
        tokens_per_gib=int(2**30 / runner.kv_bytes_per_token),
    )


def read_windows(runner: DecoderRunner, windows: list[list[int]]) -> Iterator[tuple[float, int]]:
    """Log-likelihood of each token but a window's first, and the likeliest one there; all windows side by side.

    Raises:
        ConfigError: they do not fit.
    """
    longest = max(map(len, windows))
    num_blocks = -(-longest // runner.block_size)
    if longest > runner.max_model_len or num_blocks * len(windows) > runner.num_blocks:
        raise ConfigError(f"{len(windows)} windows of {longest} tokens do not fit; lower --window, or raise "
                          "--kv-cache-memory-bytes in --engine-flags")  # fmt: skip
    sequences = []
    for i in range(len(windows)):
        sequences.append(stepping.make_sequence(i, [], max_tokens=longest))
        sequences[i].block_ids = list(range(i * num_blocks, (i + 1) * num_blocks))
    for position in range(longest - 1):
        yield from _read_position(runner, sequences, windows, position)


def _read_position(
    runner: DecoderRunner, sequences: list[Sequence], windows: list[list[int]], position: int
) -> Iterator[tuple[float, int]]:
    """One step: the token at `position` of each window that has one behind it."""
    chunks, expected = [], []
    for sequence, window in zip(sequences, windows, strict=True):
        if position + 1 < len(window):
            sequence.token_ids.append(window[position])
            chunks.append(PlannedChunk(sequence, position, 1, is_sampling=True))
            expected.append(window[position + 1])
    scores = runner.compute_logits(BatchPlan(tuple(chunks))).log_softmax(-1)
    for row, token in zip(scores, expected, strict=True):
        yield float(row[token]), int(row[: runner.vocab_size].argmax())


def _continue_prompts(bench: stepping.Bench, tokens: list[int], settings: QualityConfig) -> list[list[int]]:
    """Greedy answers to passages of the text, spread over it."""
    starts = [i * (len(tokens) - settings.prompt_len) // settings.prompts for i in range(settings.prompts)]
    prompts = [tokens[start : start + settings.prompt_len] for start in starts]
    sequences = [stepping.make_sequence(i, list(p), max_tokens=settings.answer_len) for i, p in enumerate(prompts)]
    bench.add(sequences)
    while any(sequence.num_output < settings.answer_len for sequence in sequences):
        bench.step(1)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def _format(title: str, results: list[Quality]) -> str:
    head = f"  {'':28}{'tokens/GiB':>12}{'perplexity':>12}{'change':>10}{'positions':>11}{'answers':>9}{'tokens':>9}"
    rows = [
        f"  {r.name:28}{r.tokens_per_gib:12,}{r.perplexity:12.4f}{100 * r.perplexity_change:+8.2f} %"
        f"{100 * r.same_positions:9.2f} %{r.same_answers:9}{100 * r.tokens_before_difference:7.1f} %"
        for r in results
    ]
    last = "  positions, answers, tokens before the first difference: the same as the plain worker's"
    return "\n".join([title, head, *rows, last])
