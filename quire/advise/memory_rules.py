"""Rules on the KV cache: whose prompts it can share, how it is cut up, how much of it there is, and its numbers.

Each rule takes a snapshot to an advice, or to None. `docs/tuning.md` says the same for people; thresholds that are not
explained here are those that operators of such systems use.
"""

from __future__ import annotations

from quire.advise.advice import Advice, Group
from quire.advise.snapshot import Snapshot

MIN_ENDED = 5
"""Requests that must have ended before their mean length says anything."""
MIN_QUERIES = 2_000
"""Tokens that must have been looked up before a hit rate says anything."""
LOW_HIT_RATE = 0.01
SHORT_TOKENS, SHORT_BLOCK = 256, 8
"""Up to this mean length the last block, half empty on average, is 3 % of a sequence and more with blocks of 16."""
LONG_TOKENS, LONG_BLOCK = 2_048, 32
MAX_FRAGMENTATION = 0.05
MIN_BLOCKS_FOR_FRAGMENTATION = 8
MIN_UTILIZATION, USUAL_UTILIZATION, MAX_UTILIZATION = 0.85, 0.90, 0.92
TIGHT_UTILIZATION, CROWDED_UTILIZATION = 0.80, 0.95
MIN_FULL_REQUESTS = 2.0
"""With room for fewer requests of full length weights are taken to fill the card."""
LOW_USAGE = 0.8
PREEMPTIONS_PER_REQUEST = 0.01
WIDE_KV = {"bf16": 1.94, "bfloat16": 1.94, "fp16": 1.94, "float16": 1.94, "fp32": 3.88, "float32": 3.88}
"""Tokens that int8 holds for one of these, heads of 64 (docs/performance.md, "Quantized keys and values")."""


def prefix_cache_off(s: Snapshot) -> Advice | None:
    """It costs nothing where nothing repeats."""
    if s.settings.has_prefix_cache is not False:
        return None
    return Advice(
        rule="prefix-cache-off",
        group=Group.PREFIX_CACHING,
        title="Prefix caching is off: turn it on",
        flags=("--enable-prefix-caching",) if s.settings.kv_layout != "contiguous" else ("--kv-layout=paged",),
        seen="off; how often prompts begin alike cannot be known while it is",
        gain="measured in docs/performance.md with 200 shared and 50 own tokens: time to first token × 0.27, KV blocks "
        "× 0.43; with 1,500 shared × 0.07. Nothing if no two prompts begin alike",
        factor=3.7,
    )


def prefixes_do_not_repeat(s: Snapshot) -> Advice | None:
    if not s.settings.has_prefix_cache or s.num_prefix_queries < MIN_QUERIES:
        return None
    rate = s.num_prefix_hits / s.num_prefix_queries
    if rate >= LOW_HIT_RATE:
        return None
    return Advice(
        rule="prefix-cache-cold",
        group=Group.PREFIX_CACHING,
        title="The prefix cache finds nothing: let prompts begin with what they share",
        seen=f"{rate:.1%} of {s.num_prefix_queries:,.0f} prompt tokens were found",
        gain="not known: if prompts share instructions or documents, put those first, word for word, and what differs "
        "(names, times, the question) last; use one cache_salt for all that may share. Leave the cache on: it costs "
        "nothing that was measurable",
    )


def block_size(s: Snapshot) -> Advice | None:
    """The last block of each sequence is half empty on average; large blocks are fewer to keep books of."""
    size, length = s.settings.block_size, s.mean_length
    if not size or s.num_ended < MIN_ENDED or length < 1:
        return None
    if length <= SHORT_TOKENS and size > SHORT_BLOCK:
        wanted, why = SHORT_BLOCK, "sequences are short"
    elif length >= LONG_TOKENS and size < LONG_BLOCK:
        wanted, why = LONG_BLOCK, "sequences are long"
    elif _fragmentation(s) > MAX_FRAGMENTATION and size > SHORT_BLOCK:
        wanted, why = max(SHORT_BLOCK, size // 2), "too many slots are empty"
    else:
        return None
    before, after = _empty_share(length, size), _empty_share(length, wanted)
    gain = (
        f"by arithmetic: {after:.1%} of slots empty instead of {before:.1%}, so 1 in {1 / (before - after):.0f} tokens "
        "more in the same memory"
        if wanted < size
        else f"by arithmetic: {wanted / size:.0f} times fewer blocks to keep books of, {after - before:.1%} more slots "
        "empty"
    )
    return Advice(
        rule="block-size",
        group=Group.BLOCKS_AND_MEMORY,
        title=f"Blocks of {size} tokens do not fit, {why}: use {wanted}",
        flags=(f"--block-size={wanted}",),
        seen=f"requests of {length:.0f} tokens on average, {_fragmentation(s):.1%} of slots in use empty now",
        gain=gain,
        factor=max(1.0, (1 - after) / (1 - before)),
    )


def memory_utilization(s: Snapshot) -> Advice | None:
    """On a GPU only: elsewhere the cache's size is a flag of its own."""
    now, wanted, why = s.settings.gpu_memory_utilization, 0.0, ""
    if not s.settings.is_cuda or not now:
        return None
    num_tokens = s.num_blocks * s.settings.block_size / s.num_workers
    if 0 < num_tokens < MIN_FULL_REQUESTS * s.settings.max_model_len:
        if now > TIGHT_UTILIZATION:
            wanted, why = TIGHT_UTILIZATION, "weights fill the card, and a step's peak needs room beside them"
    elif s.is_short_of_blocks and now < MIN_UTILIZATION:
        wanted, why = USUAL_UTILIZATION, "memory is short and the card has more"
    elif s.is_short_of_blocks and now < CROWDED_UTILIZATION:
        wanted, why = CROWDED_UTILIZATION, "memory is what limits concurrency"
    elif now > MAX_UTILIZATION and s.most_usage < LOW_USAGE:
        wanted, why = USUAL_UTILIZATION, "the cache was never full, and the card has little room for anything else"
    if not wanted:
        return None
    return Advice(
        rule="memory-utilization",
        group=Group.BLOCKS_AND_MEMORY,
        title=f"--gpu-memory-utilization={now:g}: set {wanted:g}, {why}",
        flags=(f"--gpu-memory-utilization={wanted:g}",),
        seen=f"a KV cache of {num_tokens:,.0f} tokens a worker, at most {s.most_usage:.0%} of it ever used, "
        f"{s.num_waiting:.0f} waiting",
        gain=f"expected, not measured: {wanted - now:+.0%} of the card for the KV cache",
        factor=max(1.0, wanted / now),
    )


def kv_quantization(s: Snapshot) -> Advice | None:
    wide = s.settings.kv_cache_dtype if s.settings.kv_cache_dtype != "auto" else s.settings.dtype
    if wide not in WIDE_KV or not s.is_short_of_blocks:
        return None
    return Advice(
        rule="kv-quantization",
        group=Group.KV_QUANTIZATION,
        title=f"The KV cache is full of {wide}: keep int8",
        flags=("--kv-cache-dtype=int8",),
        seen=f"{s.usage:.0%} of blocks in use, {s.num_waiting:.0f} waiting, {_preempted(s)}",
        gain=f"measured in docs/performance.md: {WIDE_KV[wide]:.2f} times the tokens in the same bytes; perplexity "
        "−0.06 %, the same likeliest token at 97 % of positions (SmolLM2-135M; `quire bench quality` measures yours)",
        factor=WIDE_KV[wide],
    )


def preemptions(s: Snapshot) -> Advice | None:
    if s.num_preemptions < 1 or s.num_preemptions < PREEMPTIONS_PER_REQUEST * s.num_ended:
        return None
    flags, ways = [], []
    if s.settings.lacks_swap:
        flags += ["--swap-space=4"] + (["--preemption-mode=auto"] if s.settings.preemption_mode == "recompute" else [])
        ways.append("--swap-space keeps who gives way in host memory instead")
    if s.settings.max_model_len > 4 * s.mean_length > 0:
        flags.append(f"--max-model-len={_round_up(3 * s.mean_length)}")
        ways.append("a shorter --max-model-len refuses the few that take most of the memory")
    if s.settings.quantization in ("", "none"):
        ways.append("4-bit weights (--quantization int4, on CPUs) leave more memory for the cache")
    if not s.settings.is_cuda:
        ways.append("a larger --kv-cache-memory-bytes, if the machine has it")
    return Advice(
        rule="preemptions",
        group=Group.OTHER,
        title="Sequences are preempted again and again: more room for them, or fewer",
        flags=tuple(flags),
        seen=_preempted(s),
        gain="; ".join(["expected, not measured: what is preempted has all of its tokens computed again", *ways]),
        factor=1.2,
    )


def _preempted(s: Snapshot) -> str:
    return f"{s.num_preemptions:.0f} sequences preempted {_when(s)}, {s.num_ended:.0f} requests ended"


def _when(s: Snapshot) -> str:
    return f"in {s.seconds:.0f} s" if s.seconds else "since the start"


def _fragmentation(s: Snapshot) -> float:
    """Of the slots in use, as far as there are enough to tell."""
    return 1.0 - s.slot_utilization if s.usage * s.num_blocks >= MIN_BLOCKS_FOR_FRAGMENTATION else 0.0


def _empty_share(length: float, size: int) -> float:
    """Share of slots that are empty when sequences of `length` tokens leave half of their last block empty."""
    return (size / 2) / (length + size / 2)


def _round_up(tokens: float) -> int:
    """To a power of two."""
    return int(2 ** max(8, (int(tokens) - 1).bit_length()))
